#include <ddpkit/train/run.h>

#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include <fmt/format.h>

#include <ddpkit/comm/trace.h>
#include <ddpkit/error.h>
#include <ddpkit/train/json_text.h>
#include <ddpkit/train/text.h>

namespace ddpkit::train {

Run::Run(const RunOptions& options, const Options& declared, const ProcessGroup& group)
    : options_(options),
      declared_(declared),
      group_(group),
      amp_(options.amp ? optim::fastest_type(group.device()) : at::kFloat),
      scaler_(group, {.enabled = amp_ == at::kHalf}) {}

const char* Run::precision_name() const {
  return amp_ == at::kFloat ? "off" : amp_ == at::kHalf ? "float16" : "bfloat16";
}

optim::Autocast Run::autocast(c10::Device device) const {
  return {device, amp_ == at::kFloat ? at::kBFloat16 : amp_, {.enabled = amp_ != at::kFloat}};
}

// The warm-up begins at the rate for one device (Goyal et al., arXiv 1706.02677).
optim::Schedule Run::schedule(const RunParts& parts) const {
  optim::Schedule result;
  if (options_.lr_schedule == "cosine") result = optim::cosine_decay(parts.updates_per_epoch * options_.epochs);
  const auto updates = static_cast<std::int64_t>(static_cast<double>(parts.updates_per_epoch) * options_.warmup_epochs);
  if (updates == 0) return result;
  const double scale = optim::learning_rate_scale(options_.lr_scaling, parts.devices);
  return result * optim::warmup(updates, scale > 1 ? std::min(1 / scale, parts.most_warmup_start) : 1.0 / 3);
}

void Run::start(const RunParts& parts, const nlohmann::json& facts) {
  model_ = &parts.model;
  optimizer_ = &parts.optimizer;
  scheduler_.emplace(parts.optimizer, schedule(parts),
                     optim::LearningRateOptions{.scaling = options_.lr_scaling, .world_size = parts.devices});
  state_ = {checkpoint_part("scheduler", *scheduler_), checkpoint_part("scaler", scaler_)};
  state_.insert(state_.end(), parts.state.begin(), parts.state.end());
  nlohmann::json config = nlohmann::json::parse(declared_.resolved());
  config.update(facts);
  config.update(
      {{"program", declared_.program()}, {"precision", precision_name()}, {"world_size", group_.world_size()}});
  stop_.emplace(group_);
  if (options_.save_dir.empty()) return;
  const std::string description = json_text(config);
  folder_ = open_run_folder(options_, declared_, description, parts.facts_that_may_differ, group_);
  checkpoint_.emplace(folder_.checkpoint, group_, CheckpointOptions{.keep = options_.save_total_limit});
  if (folder_.to_resume) info_ = checkpoint_->load(*model_, *optimizer_, state_);
  info_.config = description;
  kept_step_ = info_.step;
  open_summary(summary_, options_, folder_, description, info_.step, group_);
}

void Run::step_optimizer() {
  scaler_.step(*optimizer_);
  scaler_.update();
  scheduler_->step();
}

void Run::save(bool is_best) {
  kept_step_ = info_.step;
  if (checkpoint_) checkpoint_->save(*model_, *optimizer_, info_, state_, is_best);
}

bool Run::must_end() {
  if (is_out_of_steps()) return true;
  is_stopped_ = stop_->requested();
  return is_stopped_;
}

bool Run::finish() {
  if (checkpoint_) checkpoint_->wait();
  if (is_stopped_ && is_main())
    log_line(fmt::format("{}: {}", declared_.program(), stop_->describe(kept_step_, checkpoint_.has_value())));
  return !is_stopped_;
}

void Run::print_resumed(const std::string& where) const {
  if (folder_.to_resume) print_line(fmt::format("resumed from {}, {}", folder_.checkpoint.string(), where));
}

Epoch::Epoch(Run& run, std::int64_t updates, std::int64_t items, const std::string& unit)
    : run_(run),
      updates_(updates),
      items_(items),
      bar_(updates,
           progress_options(run.options_, fmt::format("Epoch {}/{} Training", run.info_.epoch + 1, run.options_.epochs),
                            unit, static_cast<double>(items) / static_cast<double>(updates), run.group_)) {}

bool Epoch::next() {
  if (done_ == updates_) return false;
  if (run_.must_end()) {
    if (run_.is_stopped_ && done_ > 0) run_.save();  // Without a new update, the last checkpoint is already current.
    return false;
  }
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
  if (!run_.is_main()) return;
  const std::int64_t step = run_.info_.step;
  nlohmann::ordered_json json = {
      {"epoch", run_.info_.epoch}, {"epochs", run_.options_.epochs}, {"step", step}, {"lr", lr_}};
  json.update(values);
  print_line(run_.options_.json ? json.dump()
                                : fmt::format("Epoch {}/{} - {}", run_.info_.epoch, run_.options_.epochs, line));
  if (!run_.summary_) return;
  for (const auto& [tag, value] : scalars) run_.summary_->add_scalar(tag, value, step);
  run_.summary_->add_scalar("training/lr", lr_, step);
}

EvaluationScope::EvaluationScope(torch::nn::Module& model, const ProcessGroup& group)
    : model_(model), was_training_(model.is_training()) {
  for (const at::Tensor& buffer : model.buffers()) group.broadcast(buffer);
  model.eval();
}

EvaluationScope::~EvaluationScope() { model_.train(was_training_); }

}  // namespace ddpkit::train
