// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <string>

namespace ddpkit::bench {

/// First word of the lines that a rank of `ddpkit bench recovery` prints:
/// - "recovery ready RANK PID" after kRecoveryWarmup steps,
/// - "recovery step RANK TIME_US LONGEST_US" after the first step of the group that has lost or gained a rank. TIME_US
///   is a time of CLOCK_MONOTONIC. LONGEST_US: the longest step since the line before.
/// benchmarks/peers/recovery.py prints the same lines.
inline constexpr const char* kRecoveryReport = "recovery ";
inline constexpr int kRecoveryWarmup = 20;

struct RecoveryRankOptions {
  std::string system;             ///< "elastic", or "restart": with checkpoints.
  std::string model;              ///< A result of model_argument().
  std::string optimizer;          ///< "sgd" or "adamw".
  std::string checkpoint = {};    ///< File of "restart".
  std::int64_t resident_mib = 0;  ///< Memory that the rank touches before it trains.
};

/// Trains as one rank, until some steps after the recovery. Returns the exit code.
int run_recovery_rank(const RecoveryRankOptions& options);

}  // namespace ddpkit::bench
