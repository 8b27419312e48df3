#include <ddpkit/train/run.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include <fmt/format.h>

#include <ddpkit/comm/trace.h>
#include <ddpkit/error.h>
#include <ddpkit/train/metrics.h>

#include "train/profile_window.h"

namespace ddpkit::train {

Epoch::Epoch(Run& run, std::int64_t updates, std::int64_t items, const std::string& unit)
    : run_(run),
      updates_(updates),
      items_(items),
      unit_(unit),
      bar_(run.bar(run.info_.epoch + 1, "Training", updates, unit,
                   static_cast<double>(items) / static_cast<double>(updates))) {}

bool Epoch::next() {
  const bool must_end = done_ < updates_ && run_.must_end();
  if (done_ > 0 && run_.profile_) run_.profile_->end_update();
  if (done_ == updates_) return false;
  if (must_end) {
    if (run_.is_stopped_ && done_ > 0) run_.save();  // Without a new update, the last checkpoint is already current.
    return false;
  }
  if (run_.profile_) run_.profile_->begin_update();
  set_step(run_.info_.step);
  lr_ = run_.scheduler_->learning_rates().front();
  return true;
}

void Epoch::advance(const std::function<std::string()>& note) {
  ++done_;
  run_.note_update();
  bar_.advance(note);
  const std::int64_t interval = run_.options_.save_steps;
  if (done_ < updates_ && interval > 0 && run_.info_.step % interval == 0) run_.save();
}

bool Epoch::finish(double loss) {
  seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  bar_.clear();
  run_.print_profile(false);
  run_.note_items(items_ * done_ / std::max<std::int64_t>(updates_, 1), seconds_, unit_);
  if (run_.is_stopped_) return false;
  if (!std::isfinite(loss))
    throw Error(
        fmt::format("the loss became {} in epoch {}: lower --lr ({})", loss, run_.info_.epoch + 1, run_.options_.lr),
        {.rank = 0});
  if (done_ < updates_) return false;
  run_.note_epoch();
  return true;
}

void Epoch::report(const std::string& line, const nlohmann::ordered_json& values,
                   const std::vector<std::pair<std::string, double>>& scalars) {
  nlohmann::ordered_json json = {
      {"epoch", run_.info_.epoch}, {"epochs", run_.options_.epochs}, {"step", run_.info_.step}, {"lr", lr_}};
  json.update(values);
  json.update({{unit_ + "_per_second", items_per_second()},
               {"seconds", seconds_},
               {"peak_memory_bytes", peak_memory_of_ranks(run_.group_)},
               {"peak_device_bytes", peak_memory_of_devices(run_.devices_, run_.group_)},
               {"world_size", run_.group_.world_size()},
               {"devices", run_.devices()}});
  std::vector<std::pair<std::string, double>> all = scalars;
  all.emplace_back("training/lr", lr_);
  run_.report(line, json, all);
}

EvaluationScope::EvaluationScope(torch::nn::Module& model, const ProcessGroup& group)
    : model_(model), was_training_(model.is_training()) {
  for (const at::Tensor& buffer : model.buffers()) group.broadcast(buffer);
  model.eval();
}

EvaluationScope::~EvaluationScope() { model_.train(was_training_); }

}  // namespace ddpkit::train
