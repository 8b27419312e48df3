#include <algorithm>
#include <cctype>
#include <cmath>
#include <iostream>
#include <memory>
#include <optional>
#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>
#include <ddpkit/parse_number.h>
#include <ddpkit/scaling/estimate.h>
#include <ddpkit/scaling/memory.h>
#include <ddpkit/scaling/nccl.h>

#include "commands.h"
#include "estimate/links.h"
#include "estimate/profile_file.h"
#include "estimate/published.h"
#include "estimate/report.h"
#include "output_file.h"

namespace ddpkit::cli {
namespace {

struct EstimateOptions {
  std::string profile;
  double compute_ms = 0;
  double other_ms = 0;
  double parameters = 0;
  int element_bytes = 4;
  double bucket_cap_mb = 25;
  double first_bucket_cap_mb = 1;
  Links links;
  scaling::TrainingEstimateOptions training;
  double unit_parameters = 0, root_parameters = 0;
  double optimizer_states = 2;
  int prefetch = 1;
  double hours = 0;  ///< On one device.
  std::string plot;
  bool json = false;
  bool check = false;
};

scaling::StepProfile make_profile(const EstimateOptions& options) {
  if (!options.profile.empty()) return read_profile(options.profile);
  return scaling::assume_step({.compute_us = options.compute_ms * 1e3,
                               .other_us = options.other_ms * 1e3,
                               .parameter_bytes = options.parameters * options.element_bytes,
                               .bucket_bytes = options.bucket_cap_mb * (1 << 20),
                               .first_bucket_bytes = options.first_bucket_cap_mb * (1 << 20)});
}

/// Returns the memory per rank of a fully sharded model; otherwise nothing. [estimate]
std::vector<scaling::RankMemory> memory_of(const EstimateOptions& options, const scaling::StepProfile& profile) {
  if (!options.training.step.fully_sharded) return {};
  double gradients = 0;
  for (const scaling::BucketProfile& bucket : profile.buckets) gradients += bucket.bytes;
  constexpr double kShardBytes = 4;  // Shards and optimizer state are float32.
  std::vector<scaling::RankMemory> memory;
  for (const int devices : options.training.devices)
    memory.push_back(scaling::fully_sharded_memory({.parameter_bytes = kShardBytes * gradients / options.element_bytes,
                                                    .unit_bytes = kShardBytes * options.unit_parameters,
                                                    .root_bytes = kShardBytes * options.root_parameters,
                                                    .optimizer_states = options.optimizer_states,
                                                    .prefetch = options.prefetch,
                                                    .gathered_fraction = options.element_bytes / kShardBytes},
                                                   devices));
  return memory;
}

int run_estimate(EstimateOptions& options) try {
  if (options.check) {
    std::cout << published_table(published_points());
    return 0;
  }
  if (!options.plot.empty()) check_output(options.plot);
  const scaling::StepProfile profile = make_profile(options);
  const LinkModel links = make_links(options.links);
  options.training.step.overlap = links.overlap;
  options.training.step.contention = links.contention;
  if (options.training.price_per_hour < 0) options.training.price_per_hour = links.price_per_hour;
  if (options.hours > 0) options.training.steps = options.hours * 3.6e9 / profile.step_us();
  const auto estimates = scaling::estimate_training_speedup(profile, links.all_reduce, options.training);
  const std::optional<Limits> limits = limits_of(profile, links, options.training.step);
  const auto memory = memory_of(options, profile);
  std::cout << (options.json ? estimate_json(profile, links, estimates, limits, memory) + "\n"
                             : estimate_table(profile, links, estimates, limits) + memory_table(estimates, memory));
  if (options.plot.empty()) return 0;
  auto curve = options.training;
  curve.devices.clear();
  for (int devices = 1; devices <= links.most_devices; devices *= 2) curve.devices.push_back(devices);
  write_output(options.plot,
               estimate_plot(links, scaling::estimate_training_speedup(profile, links.all_reduce, curve)));
  return 0;
} catch (const std::invalid_argument& error) {
  throw InvalidArgument(error.what());
}

}  // namespace

train::Options::Option add_parameter_count(train::Options& options, const std::string& name, double& parameters,
                                           const std::string& help) {
  const auto parse = [&parameters](const std::string& text) {
    constexpr std::string_view kUnits = "kmgb";
    constexpr double kFactors[] = {1e3, 1e6, 1e9, 1e9};
    std::string_view number = text;
    double factor = 1;
    if (!number.empty()) {
      const auto unit = kUnits.find(static_cast<char>(std::tolower(static_cast<unsigned char>(number.back()))));
      if (unit != std::string_view::npos) factor = kFactors[unit], number.remove_suffix(1);
    }
    double value = 0;
    if (!parse_number(number, value) || !std::isfinite(value) || value < 0) return "a number such as 7.16M or 1.2G";
    parameters = value * factor;
    return "";
  };
  const auto show = [&parameters] { return parameters > 0 ? fmt::format("{}", parameters) : std::string(); };
  return options.add(name, parse, show, help);
}

void add_estimate(train::Options& app, Commands& commands) {
  train::Options& command = app.command("estimate", "Predicted step time, speed-up and cost on several devices");
  command.epilog(
      "The input is the step on one device: --profile, a timeline of a training run (DDPKIT_TIMELINE=FILE),\n"
      "or --compute-ms and --params. The batch per device is constant, so the global batch grows with the devices.\n"
      "With --fixed-global-batch, the global batch is constant.\n"
      "docs/scaling.md explains the model, its constants and its errors.");
  auto shared = std::make_shared<EstimateOptions>();
  EstimateOptions& options = *shared;
  Links& links = options.links;
  scaling::TrainingEstimateOptions& training = options.training;
  training.price_per_hour = -1;
  command.add("profile", &options.profile, "File of a run's timeline");
  command.add("compute_ms", &options.compute_ms, "Forward and backward of one device, in milliseconds").above(0);
  add_parameter_count(command, "params", options.parameters, "Parameters of the model: 7.16M, 1.2G");
  command.add("other_ms", &options.other_ms, "Update, data and the rest, in milliseconds").at_least(0);
  command.add("element_bytes", &options.element_bytes, "Bytes per gradient element").between(1, 16);
  command.add("bucket_cap_mb", &options.bucket_cap_mb, "Bucket cap of DistributedDataParallel").above(0);
  command.add("first_bucket_cap_mb", &options.first_bucket_cap_mb, "Cap of the first bucket").above(0);
  std::vector<std::string> names = {"shm"};
  for (const auto& cluster : scaling::gpu_clusters()) names.push_back(cluster.name);
  command.add("cluster", &links.cluster, fmt::format("Devices and their links: {}", fmt::join(names, ", ")))
      .one_of(names);
  command
      .add("bandwidth_GBps", &links.bandwidth_GBps,
           "Bandwidth of custom links per direction, in 10^9 bytes per second; replaces --cluster")
      .above(0);
  command.add("alpha_us", &links.alpha_us, "Time of an empty message on custom links").at_least(0);
  command.add("collectives", &links.collectives, "All-reduces measured by `ddpkit bench collectives --csv FILE`");
  command.add("devices", &training.devices, "Numbers of devices").between(1, 65536);
  command.add("fixed_global_batch", &training.step.fixed_global_batch,
              "Split the batch of one device over all devices (strong scaling)");
  command.add("sharded_update", &training.step.sharded_update,
              "Each device updates its part of the weights: divides --other-ms by the number of devices");
  command.add("fully_sharded", &training.step.fully_sharded,
              "Each device keeps a shard of the model (FullyShardedDataParallel): includes --sharded-update, adds the "
              "gathers of the weights, and the memory of a device without activations");
  add_parameter_count(command, "unit_params", options.unit_parameters,
                      "Parameters of the largest unit, such as a block of a transformer")
      .needs("fully_sharded");
  add_parameter_count(command, "root_params", options.root_parameters, "Parameters in no unit, such as embeddings")
      .needs("fully_sharded");
  command
      .add("optimizer_states", &options.optimizer_states, "State elements per parameter: AdamW 2, SGD with momentum 1")
      .at_least(0)
      .needs("fully_sharded");
  command.add("prefetch", &options.prefetch, "Number of units that are gathered ahead; 0 over shm")
      .between(0, 1000)
      .needs("fully_sharded");
  command.add("hours", &options.hours, "Duration of the training on one device; adds times and cost").above(0);
  command
      .add("price_per_hour", &training.price_per_hour,
           "Price of one device (default for clusters: a typical cloud price)")
      .at_least(0);
  command.add("plot", &options.plot, "Plot the speed-up for up to 4,096 devices to this SVG file");
  command.add("json", &options.json, "One JSON object instead of the table");
  command.add("check", &options.check, "Compare the model with published measurements, and show its errors");
  commands.emplace_back(&command, [shared, &command] {
    EstimateOptions& options = *shared;
    const bool has_step = command.is_given("compute_ms") && command.is_given("params");
    if (!options.check && command.is_given("profile") == has_step)
      throw train::UsageError("a step is needed: --profile FILE, or --compute-ms and --params");
    if (options.training.step.fully_sharded && !command.is_given("unit_params"))
      throw train::UsageError("--fully-sharded needs --unit-params: FullyShardedDataParallel::units() has the sizes");
    if (!command.is_given("devices") && !options.links.collectives.empty())
      options.training.devices = {1, make_links(options.links).most_devices};
    return run_estimate(options);
  });
}

}  // namespace ddpkit::cli
