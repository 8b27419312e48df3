// Tier 0: the standard library only.
#pragma once

#include <string>

#include <ddpkit/scaling/all_reduce.h>

namespace ddpkit::cli {

/// The options that describe the links between devices.
struct Links {
  std::string cluster = "h100";  ///< A GPU cluster, "shm" for CPU ranks of this host, or see below.
  double alpha_us = -1;          ///< With bandwidth_GBps: custom links, by the fastest alpha-beta model.
  double bandwidth_GBps = 0;
  std::string collectives = {};  ///< A CSV file of `ddpkit bench collectives`: measured all-reduces.
};

/// A model of all-reduce with its prediction options.
struct LinkModel {
  scaling::AllReduceModel all_reduce;
  std::string name;
  bool overlap = true;
  double contention = 1;
  double price_per_hour = 0;
  int most_devices = 4096;  ///< Largest number of devices for which the model is valid.
  bool any_number = true;   ///< True: valid for all numbers up to `most_devices`. False: valid for this number only.
};

/// Throws InvalidArgument for unknown links, a file that cannot be read, or a file without all-reduces on symmetric
/// memory.
LinkModel make_links(const Links& links);

}  // namespace ddpkit::cli
