// Tier 0 and CLI11. Numbers that a user gives: strictly read, no NaN, nothing behind them.
#pragma once

#include <CLI/CLI.hpp>

namespace ddpkit::cli {

/// Checks of an option's text.
CLI::Validator positive_number();
/// Bounds included.
CLI::Validator number_between(double low, double high);
CLI::Validator number_from_zero();
CLI::Validator whole_number_between(int low, int high);

/// Of an environment variable, `otherwise` when it is not set. Throws InvalidArgument, also for what is outside of the
/// bounds.
int number_from_environment(const char* name, int low, int high, int otherwise);

}  // namespace ddpkit::cli
