#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>
#include <ddpkit/scaling/estimate.h>
#include <ddpkit/scaling/nccl.h>
#include <ddpkit/train/options.h>

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
  double element_bytes = 4;
  double bucket_cap_mb = 25;
  double first_bucket_cap_mb = 1;
  Links links;
  scaling::TrainingEstimateOptions training;
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

int run_estimate(EstimateOptions options) try {
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
  std::cout << (options.json ? estimate_json(profile, links, estimates, limits) + "\n"
                             : estimate_table(profile, links, estimates, limits));
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

CLI::AsNumberWithUnit parameter_count() {
  return CLI::AsNumberWithUnit(std::map<std::string, double>{{"k", 1e3}, {"m", 1e6}, {"g", 1e9}, {"b", 1e9}});
}

void add_estimate(CLI::App& app, std::function<int()>& run) {
  auto options = std::make_shared<EstimateOptions>();
  options->training.price_per_hour = -1;
  CLI::App* command = app.add_subcommand("estimate", "Predicted step time, speed-up and cost on several devices");
  command->footer(
      "The input is the step on one device: --profile, a timeline of a training run (DDPKIT_TIMELINE=FILE),\n"
      "or --compute-ms and --params. The batch per device is constant, so the global batch grows with the devices.\n"
      "With --fixed-global-batch, the global batch is constant.\n"
      "docs/scaling.md explains the model, its constants and its errors.");
  CLI::Option* profile = command->add_option("--profile", options->profile, "Timeline of a run")->type_name("FILE");
  CLI::Option* compute =
      command->add_option("--compute-ms", options->compute_ms, "Forward and backward of one device, in milliseconds")
          ->check(train::positive_number())
          ->type_name("MS");
  CLI::Option* parameters = command->add_option("--params", options->parameters, "Parameters of the model: 7.16M, 1.2G")
                                ->transform(parameter_count())
                                ->check(train::number_from_zero())
                                ->type_name("N");
  command->add_option("--other-ms", options->other_ms, "Update, data and the rest, in milliseconds (default: 0)")
      ->check(train::number_from_zero())
      ->type_name("MS");
  command->add_option("--element-bytes", options->element_bytes, "Bytes per gradient element (default: 4)")
      ->check(train::whole_number(1, 16))
      ->type_name("N");
  command->add_option("--bucket-cap-mb", options->bucket_cap_mb, "Bucket cap of DistributedDataParallel (default: 25)")
      ->check(train::positive_number())
      ->type_name("MIB");
  command->add_option("--first-bucket-cap-mb", options->first_bucket_cap_mb, "Cap of the first bucket (default: 1)")
      ->check(train::positive_number())
      ->type_name("MIB");
  std::vector<std::string> names = {"shm"};
  for (const auto& cluster : scaling::gpu_clusters()) names.push_back(cluster.name);
  command
      ->add_option("--cluster", options->links.cluster,
                   fmt::format("Devices and their links: {} (default: h100)", fmt::join(names, ", ")))
      ->check(CLI::IsMember(names))
      ->type_name("NAME");
  command
      ->add_option("--bandwidth-GBps", options->links.bandwidth_GBps,
                   "Bandwidth of custom links per direction, in 10^9 bytes per second; replaces --cluster")
      ->check(train::positive_number())
      ->type_name("N");
  command->add_option("--alpha-us", options->links.alpha_us, "Time of an empty message on custom links (default: 5)")
      ->check(train::number_from_zero())
      ->type_name("US");
  command
      ->add_option("--collectives", options->links.collectives,
                   "All-reduces measured by `ddpkit bench collectives --csv FILE`")
      ->type_name("FILE");
  CLI::Option* devices =
      command->add_option("--devices", options->training.devices, "Numbers of devices (default: 1,2,4,8)")
          ->delimiter(',')
          ->allow_extra_args(false)
          ->check(CLI::Range(1, 65536))
          ->type_name("N,...");
  command->add_flag("--fixed-global-batch", options->training.step.fixed_global_batch,
                    "Split the batch of one device over all devices (strong scaling)");
  command->add_flag("--sharded-update", options->training.step.sharded_update,
                    "Each device updates its part of the weights: divides --other-ms by the number of devices");
  command->add_option("--hours", options->hours, "Duration of the training on one device; adds times and cost")
      ->check(train::positive_number())
      ->type_name("H");
  command
      ->add_option("--price-per-hour", options->training.price_per_hour,
                   "Price of one device (default for clusters: a typical cloud price)")
      ->check(train::number_from_zero())
      ->type_name("PRICE");
  command->add_option("--plot", options->plot, "Plot the speed-up for up to 4,096 devices to this file")
      ->type_name("FILE.svg");
  command->add_flag("--json", options->json, "One JSON object instead of the table");
  command->add_flag("--check", options->check, "Compare the model with published measurements, and show its errors");
  command->callback([=, &run] {
    const bool has_step = compute->count() > 0 && parameters->count() > 0;
    if (!options->check && (profile->count() > 0) == has_step)
      throw CLI::ValidationError("a step is needed: --profile FILE, or --compute-ms and --params");
    if (devices->count() == 0 && !options->links.collectives.empty()) options->training.devices.clear();
    run = [options] {
      if (options->training.devices.empty()) options->training.devices = {1, make_links(options->links).most_devices};
      return run_estimate(*options);
    };
  });
}

}  // namespace ddpkit::cli
