// Tier 0: the standard library only. CLI11 is declared, not included.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
class AsNumberWithUnit;
}  // namespace CLI

namespace ddpkit::cli {

/// Adds `ddpkit run`. If the command is given, sets `run` to a function that executes it and returns the exit code.
/// `program`: the program and its arguments, from split_program().
void add_run(CLI::App& app, const std::vector<std::string>& program, std::function<int()>& run);

/// Adds `ddpkit doctor`; as add_run().
void add_doctor(CLI::App& app, std::function<int()>& run);

/// Adds `ddpkit estimate`; as add_run().
void add_estimate(CLI::App& app, std::function<int()>& run);

/// Adds `ddpkit bench` with its subcommands, as add_run().
void add_bench(CLI::App& app, std::function<int()>& run);
void add_bench_collectives(CLI::App& bench, std::function<int()>& run);
void add_bench_step(CLI::App& bench, std::function<int()>& run);

/// Parses a number of parameters: "7.16M", "1.2G".
CLI::AsNumberWithUnit parameter_count();

/// Splits the arguments of a command that starts another program. Removes and returns the program and all arguments
/// after it, even those that look like options of ddpkit. "--" may separate the two parts.
std::vector<std::string> split_program(const CLI::App& command, std::vector<std::string>& arguments);

}  // namespace ddpkit::cli
