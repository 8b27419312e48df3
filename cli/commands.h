// Tier 0 and CLI11.
#pragma once

#include <CLI/CLI.hpp>

#include <functional>

namespace ddpkit::cli {

/// Each adds one subcommand. When the subcommand was given, `run` is set to what it does; that returns the exit code.
void add_run(CLI::App& app, std::function<int()>& run);

}  // namespace ddpkit::cli
