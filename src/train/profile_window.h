// Tier 1: ATen/core/Tensor.h, through trace.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <ddpkit/comm/trace.h>

namespace ddpkit {
class DistributedDataParallelBase;
}

namespace ddpkit::train {

/// Where the time of updates goes: microseconds over all updates of all ranks, on the clocks of the hosts.
struct Phases {
  std::int64_t updates = 0;  ///< Over all ranks.
  double data = 0;           ///< Before the first forward pass.
  double forward = 0;        ///< Forward pass and loss.
  double backward = 0;       ///< Up to the last gradient.
  double exchange = 0;       ///< From the last gradient to the end of the reduction: not hidden behind backward.
  double update = 0;         ///< The rest: optimizer, checkpoint, progress.

  double total() const { return data + forward + backward + exchange + update; }
};

/// Reads the phases of the spans "step" in a timeline's file. The time between two forward passes without an exchange
/// is that of a backward that keeps its gradients (gradient accumulation).
Phases read_phases(const std::string& path);

/// Returns a table: milliseconds per update and percent, without the last line end. `has_wrapper`: see ProfileWindow.
std::string phase_table(const Phases& phases, int ranks, bool has_wrapper);

/// The updates that RunOptions::profile records: kUpdates updates after kWarmUp updates. Writes the timeline of all
/// ranks to a file.
class ProfileWindow {
 public:
  static constexpr std::int64_t kWarmUp = 10, kUpdates = 20;

  /// `wrapper`: of the model, or null; then only the update is separate from the other phases. Must outlive the window.
  ProfileWindow(const ProcessGroup& group, DistributedDataParallelBase* wrapper, std::string path);

  void begin_update();  ///< An update begins now.
  /// The update ends now, if one has begun. Collective at the begin and at the end of the window.
  void end_update();
  /// Returns a span for the step of the optimizer, if the window is open.
  std::optional<Timeline::Span> update_span() const;

  /// Returns the table of the window if the window has closed since the last call; only on rank 0. `is_last`: closes an
  /// open window, and explains why there is none. Collective.
  std::string finish(bool is_last);

 private:
  void close();

  ProcessGroup group_;
  DistributedDataParallelBase* wrapper_;
  std::string path_;
  bool in_update_ = false;
  std::int64_t seen_ = 0;               // Updates of this process.
  std::optional<Timeline> timeline_;    // While the window is open.
  std::optional<Timeline::Span> step_;  // The current update.
  std::string table_;
};

}  // namespace ddpkit::train
