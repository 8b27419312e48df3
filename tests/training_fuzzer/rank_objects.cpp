// Events that replace objects of a training: wrapper, optimizer, scheduler, checkpoints. Also the main function of a
// rank's process.
#include <optional>
#include <sstream>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <ddpkit/train/checkpoint.h>
#include <ddpkit/train/optimizer_state.h>

#include "comm/backend.h"
#include "rank.h"

namespace ddpkit::fuzz {

/// old_first: destroys the old wrapper, and with it a sharded optimizer, before creating the new wrapper.
/// under_optimizer: destroys only the wrapper first.
void RankTraining::wrap_again(const std::string& how) {
  const bool again = wraps_with_optimizer(drawn_);
  if (again) has_gradients_ = false;
  const auto old_model = model_;
  if (is_fully_sharded(drawn_)) copy_model();
  if (how == "old_first" || how == "under_optimizer") {
    if (again && how == "old_first") optimizer_ = {};
    ddp_.reset();
    wrap();
    if (again) make_optimizer();
    return;
  }
  auto old = std::move(ddp_);
  try {
    wrap();
  } catch (...) {
    ddp_ = std::move(old);  // A sharded optimizer still needs it.
    model_ = old_model;
    throw;
  }
  if (again) make_optimizer();  // The assignment destroys the old optimizer before the old wrapper.
}

/// The weights of a FullyShardedDataParallel are lost with it, so the program copies them to another model.
void RankTraining::copy_model() {
  const auto copy = std::make_shared<Model>(drawn_, rank_, group_, false);
  const auto within = scope(false);
  const torch::NoGradGuard no_grad;
  const auto from = model_->named_parameters();
  for (const auto& item : copy->named_parameters()) {
    item.value().copy_(from[item.key()]);
    item.value().set_requires_grad(from[item.key()].requires_grad());
  }
  for (const auto& item : copy->named_buffers()) item.value().copy_(model_->named_buffers()[item.key()]);
  copy->held = model_->held;
  model_ = copy;
}

void RankTraining::optimizer_again(const std::string& how) {
  if (optimizer_.sharded) has_gradients_ = false;
  added_.clear();
  if (how == "old_first") optimizer_ = {};
  make_optimizer();
}

/// same: loads into the saved object. new: loads into a new object, with a scheduler created before load().
/// schedule_after: the same with a scheduler created after load(). checkpoint: saves and loads a checkpoint file.
void RankTraining::save_load(const std::string& how) {
  if (how == "checkpoint") {
    const auto within = scope(true);
    const std::string path = folder_ + "/checkpoint.pt";
    train::save_checkpoint(path, *model_, *optimizer_.base, {}, group_);
    train::load_checkpoint(path, *model_, *optimizer_.base, group_);
    return;
  }
  // torch::save() and torch::load() of torch::optim's optimizers do not store the rate before the schedule.
  std::optional<train::StateDict> state;
  if (how == "schedule_after" && drawn_.optimizer.engine == "torch") state = train::optimizer_state(*optimizer_.base);
  if (optimizer_.sharded) optimizer_.sharded->consolidate_state(0);
  std::string bytes;
  if (!optimizer_.sharded || rank_ == 0) {
    std::ostringstream stream;
    torch::save(*optimizer_.base, stream);
    bytes = stream.str();
  }
  if (optimizer_.sharded) bytes = group_.all_gather_bytes(bytes)[0];
  if (how != "same") {
    optimizer_ = {};
    optimizer_ = fuzz::make_optimizer(drawn_.optimizer, optimizer_parameters(*model_, true), ddp_.get());
    for (const at::Tensor& added : added_) optimizer_.base->add_param_group(torch::optim::OptimizerParamGroup({added}));
    if (how == "new") make_scheduler();
  }
  std::istringstream stream(bytes);
  state ? train::load_optimizer_state(*optimizer_.base, *state) : torch::load(*optimizer_.base, stream);
  if (how == "schedule_after") make_scheduler();
}

/// Adds a parameter that receives no gradient.
void RankTraining::add_group() {
  added_.push_back(at::ones({3}, at::TensorOptions(type_named(drawn_.dtype))).set_requires_grad(true));
  optimizer_.base->add_param_group(torch::optim::OptimizerParamGroup({added_.back()}));
}

namespace {

ProcessGroup make_group(const Case& drawn, int rank, const std::string& folder) {
  const int world = drawn.wrapper.kind == "data_parallel" ? 1 : drawn.world;
  const auto store = c10::make_intrusive<c10d::FileStore>(folder + "/store", -1);
  LaunchEnvironment environment;
  environment.rank = environment.local_rank = rank;
  environment.world_size = environment.local_world_size = world;
  if (drawn.backend == "hierarchical") {  // Two equal hosts if possible, else one rank per host.
    environment.local_world_size = world % 2 == 0 ? world / 2 : 1;
    environment.local_rank = rank % environment.local_world_size;
  }
  const std::chrono::milliseconds timeout = std::chrono::seconds(6);  // Less than the time limit of the pool.
  return {create_backend(drawn.backend, store, environment, at::kCPU, timeout), store, at::kCPU, environment};
}

}  // namespace

Report run_rank(const Case& drawn, int rank, const std::string& folder) {
  Report report;
  note_failure(report, 0, [&] {
    const ProcessGroup group = make_group(drawn, rank, folder);
    RankTraining training(drawn, rank, group, folder);
    std::uint32_t event = 0;
    note_failure(training.report, 0, [&] { training.start(); });
    for (; event < drawn.events.size() && training.report.failure == Failure::kNone; ++event)
      note_failure(training.report, event, [&] { training.perform(event, drawn.events[event]); });
    // No rank exits while another rank may still need it, or may detect its end.
    if (training.report.failure == Failure::kNone) note_failure(training.report, event, [&] { group.barrier(); });
    if (training.report.failure != Failure::kNone) group.abort(training.report.message);
    report = std::move(training.report);
  });
  return report;
}

}  // namespace ddpkit::fuzz
