// Tier 0: the standard library only.
#pragma once

#include <string>

#include <ddpkit/scaling/all_reduce.h>

namespace ddpkit::cli {

/// What a user says of the links between devices.
struct Links {
  std::string cluster = "h100";  ///< A named GPU cluster, "shm" for CPU ranks of this host; or see below.
  double alpha_us = -1;          ///< With bandwidth_GBps: links of the user's own, by the fastest alpha-beta model.
  double bandwidth_GBps = 0;
  std::string collectives = {};  ///< A CSV file of `ddpkit bench collectives`: measured all-reduces.
};

/// A model of all-reduce, and how to predict with it.
struct LinkModel {
  scaling::AllReduceModel all_reduce;
  std::string name;
  bool overlap = true;
  double contention = 1;
  double price_per_hour = 0;
  int most_devices = 4096;  ///< For which the model stands.
  bool any_number = true;   ///< It stands for any number up to that; false: for that one alone.
};

/// Throws InvalidArgument for links that nobody knows, a file that cannot be read, or one without all-reduces of
/// symmetric memory.
LinkModel make_links(const Links& links);

}  // namespace ddpkit::cli
