// The two ways to run a case: a rank under ddpkit, and one process without ddpkit that simulates all ranks.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <string>

#include <ddpkit/comm/process_group.h>

#include "case.h"
#include "model.h"
#include "report.h"

namespace ddpkit::fuzz {

/// Runs the case as rank `rank`, in a group that connects through the files of `folder`.
Report run_rank(const Case& drawn, int rank, const std::string& folder);
/// Returns the reports of all ranks. [rank] Run 0 is exact. Each other run changes every value by its rounding error,
/// with other signs, to measure the effect on results.
std::vector<Report> run_reference(const Case& drawn, std::uint64_t run);

/// Returns whether the event changes only the model: freeze, unfreeze, set_layout, write, cast, edit_gradients.
bool changes_model(const Event& event);
/// Executes such an event.
void change_model(Model& model, const Event& event, int rank);
/// Returns whether the program does not read the weights after the event: backward updates them, and another rank's
/// part may come later, at the latest in step(); or the case does not gather them within a step.
bool hides_weights(const Case& drawn, const Event& event);
/// Reports buffers, and weights unless they are hidden; with `gradients` also gradients, of kind `gradient`.
void report_model(Report& report, std::uint32_t event, Model& model, bool gradients, Kind gradient);
/// Returns the parameters in the case's optimizer.
std::vector<at::Tensor> optimizer_parameters(Model& model, bool as_listed);
/// Reports the exception that `action` throws.
void note_failure(Report& report, std::uint32_t event, const std::function<void()>& action);

/// Returns whether the event replaces an object of the training. Earlier graphs are not used afterwards.
inline bool replaces(const Event& event) {
  return event.kind == "wrap_again" || event.kind == "optimizer_again" || event.kind == "save_load";
}
/// A gradient scaler automatically skips the step if the norm is not finite.
bool wants_step(const Case& drawn, const Event& event, bool has_gradients, double norm);
inline bool throws_in_hook(const Event& event) { return event.how.rfind("hook", 0) == 0; }
/// Returns whether an exception ends the program. Each rank catches its own exceptions from forward or backward. A
/// communication hook that throws ends the group.
inline bool ends_program(const Event& event) { return event.rank >= 0 || throws_in_hook(event); }
/// Returns whether forward and backward are within no_sync().
inline bool is_local(const Event& event) { return event.how == "no_sync" || event.how == "nested_no_sync"; }
/// A sharded optimizer removes gradients. The gradients of sync_batch_norm before averaging belong to a part of the
/// global batch that differs in the reference.
bool reports_gradients(const Case& drawn, const Event& event);
/// The loss scale of a case with a gradient scaler.
constexpr double kLossScale = 1024;

inline bool poisons(const Event& event, int rank) {
  return event.how == "poison" && (event.rank < 0 || event.rank == rank);
}

}  // namespace ddpkit::fuzz
