// Tier 0: the standard library only.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ddpkit/train/options.h>

namespace ddpkit::cli {

/// The subcommands, and functions that execute them and return the exit code.
using Commands = std::vector<std::pair<const train::Options*, std::function<int()>>>;

void add_run(train::Options& app, Commands& commands);
void add_doctor(train::Options& app, Commands& commands);
void add_estimate(train::Options& app, Commands& commands);
/// Adds `bench` and its subcommands.
void add_bench(train::Options& app, Commands& commands);
void add_bench_collectives(train::Options& bench, Commands& commands);
void add_bench_step(train::Options& bench, Commands& commands);
void add_bench_recovery(train::Options& bench, Commands& commands);

/// Declares --params, a number of parameters: "7.16M", "1.2G".
train::Options::Option add_parameter_count(train::Options& options, const std::string& name, double& parameters,
                                           const std::string& help);

}  // namespace ddpkit::cli
