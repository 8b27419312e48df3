// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ddpkit::bench {

struct RecoveryOptions {
  int ranks = 2;
  int rounds = 5;
  std::string model = "mlp-106k";                ///< See mlp_shape().
  std::string optimizer = "sgd";                 ///< Or "adamw".
  std::vector<std::int64_t> resident_mib = {0};  ///< Each value is a row of each system.
  bool peers = false;
  std::uint64_t seed = 0;  ///< Of the ranks that are killed, and of the moments.
};

/// One row of the table.
struct RecoveryRow {
  std::string system;
  int ranks = 0;
  std::int64_t resident_mib = 0;
  double kill_to_step_ms = 0;            ///< From the kill to the next step of all ranks.
  std::optional<double> rejoin_ms = {};  ///< From the start of a new process to the next step of all ranks with it.
  std::optional<double> stall_ms = {};   ///< The longest step of the others meanwhile.
};

inline constexpr const char* kRecoveryCsvHeader = "system,ranks,resident_mib,kill_to_step_ms,rejoin_ms,stall_ms";

std::string recovery_table_header();
std::string table_row(const RecoveryRow& row);
std::string to_csv(const RecoveryRow& row);

/// Returns the names of the systems, in the order of the table.
std::vector<std::string> recovery_systems(const RecoveryOptions& options);

/// Measures one system: medians over the rounds. Each round starts the ranks, kills one within a step, and waits for
/// the next step. Throws WorkerFailed.
RecoveryRow bench_recovery_of(const std::string& system, std::int64_t resident_mib, const RecoveryOptions& options);

}  // namespace ddpkit::bench
