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

/// Adds `ddpkit run`; when it was given, `run` is set to what it does and returns the exit code. `program` is the
/// program to start with its arguments, as split_program() leaves it.
void add_run(CLI::App& app, const std::vector<std::string>& program, std::function<int()>& run);

/// Adds `ddpkit doctor`; as add_run().
void add_doctor(CLI::App& app, std::function<int()>& run);

/// Adds `ddpkit estimate`; as add_run().
void add_estimate(CLI::App& app, std::function<int()>& run);

/// Adds `ddpkit bench` with all that it measures; when it was given, `run` is set to what it does.
void add_bench(CLI::App& app, std::function<int()>& run);
void add_bench_collectives(CLI::App& bench, std::function<int()>& run);
void add_bench_step(CLI::App& bench, std::function<int()>& run);

/// Reads a number of parameters: "7.16M", "1.2G".
CLI::AsNumberWithUnit parameter_count();

/// Cuts the arguments of a command that starts another program: takes off and returns the program and everything behind
/// it, which is the program's own even where it looks like an option of ours. "--" may stand between.
std::vector<std::string> split_program(const CLI::App& command, std::vector<std::string>& arguments);

}  // namespace ddpkit::cli
