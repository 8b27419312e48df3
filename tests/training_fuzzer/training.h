// The two ways to carry out a case: a rank under ddpkit, and one process without ddpkit that plays all ranks.
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

/// Carries out the case as rank `rank`, on a group that meets through the files of `folder`.
Report run_rank(const Case& drawn, int rank, const std::string& folder);
/// All ranks' reports. [rank] Run 0 is exact. In each other run, every value is changed by its rounding error, with
/// other signs, to see what that does to results.
std::vector<Report> run_reference(const Case& drawn, std::uint64_t run);

/// Events that touch the model alone: freeze, unfreeze, set_layout, write, cast, edit_gradients. False for others.
bool change_model(Model& model, const Event& event, int rank);
/// Weights and buffers; with `gradients` those too, of kind `gradient`.
/// Not the weights where backward updates them: another rank's part may come later, at the latest in step().
void report_model(Report& report, std::uint32_t event, Model& model, bool gradients, Kind gradient);
/// The parameters that the case's optimizer holds.
std::vector<at::Tensor> optimizer_parameters(Model& model, bool as_listed);
/// Fills in what `action` throws.
void note_failure(Report& report, std::uint32_t event, const std::function<void()>& action);

/// Events that replace an object of the training: nobody goes on with the graphs from before.
inline bool replaces(const Event& event) {
  return event.kind == "wrap_again" || event.kind == "optimizer_again" || event.kind == "save_load";
}
/// A gradient scaler itself skips the step of a norm that is not finite.
bool wants_step(const Case& drawn, const Event& event, bool has_gradients, double norm);
inline bool throws_in_hook(const Event& event) { return event.how.rfind("hook", 0) == 0; }
/// Whether an exception ends the program. All ranks catch their own from forward or backward; a communication hook that
/// throws ends the group.
inline bool ends_program(const Event& event) { return event.rank >= 0 || throws_in_hook(event); }
/// Backward and forward within no_sync().
inline bool is_local(const Event& event) { return event.how == "no_sync" || event.how == "nested_no_sync"; }
/// A sharded optimizer takes gradients away. Before they are averaged, those of sync_batch_norm are of a part of the
/// joined batch that is another one in the reference.
bool reports_gradients(const Case& drawn, const Event& event);
/// Of a case with a gradient scaler.
constexpr double kLossScale = 1024;

inline bool poisons(const Event& event, int rank) {
  return event.how == "poison" && (event.rank < 0 || event.rank == rank);
}

}  // namespace ddpkit::fuzz
