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
/// All ranks' reports. [rank]
std::vector<Report> run_reference(const Case& drawn);

/// Events that touch the model alone: freeze, unfreeze, set_layout, write, cast. False for others.
bool change_model(Model& model, const Event& event, int rank);
/// Weights and buffers; with `gradients` those too, of kind `gradient`.
void report_model(Report& report, std::uint32_t event, Model& model, bool gradients, Kind gradient);
/// The parameters that the case's optimizer holds.
std::vector<at::Tensor> optimizer_parameters(Model& model, bool as_listed);
/// Fills in what `action` throws.
void note_failure(Report& report, std::uint32_t event, const std::function<void()>& action);

/// Backward and forward within no_sync().
inline bool is_local(const Event& event) { return event.how == "no_sync" || event.how == "nested_no_sync"; }
/// Of a case with a gradient scaler.
constexpr double kLossScale = 1024;

inline bool poisons(const Event& event, int rank) {
  return event.how == "poison" && (event.rank < 0 || event.rank == rank);
}

}  // namespace ddpkit::fuzz
