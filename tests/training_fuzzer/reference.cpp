#include "reference.h"

#include <algorithm>

namespace ddpkit::fuzz {

Reference::Reference(const Case& drawn, std::uint64_t run)
    : drawn_(drawn),
      disturbance_(run == 0 ? Rounding() : rounding_of(drawn)),
      generator_(at::make_generator<at::CPUGeneratorImpl>(drawn.data + run)),
      scale_(drawn.optimizer.scaler ? kLossScale : 1) {
  for (int rank = 0; rank < drawn.world; ++rank)
    players_.push_back({.model = std::make_shared<Model>(drawn, rank, std::nullopt, true)});
  wrap();
  make_optimizers();
}

std::vector<Report> Reference::run() {
  Report failure;
  for (event_ = 0; event_ < drawn_.events.size() && failure.failure == Failure::kNone; ++event_)
    note_failure(failure, event_, [this] { perform(drawn_.events[event_]); });
  std::vector<Report> reports;
  for (Player& player : players_) {
    player.report.failure = failure.failure;
    player.report.failed_event = failure.failed_event;
    player.report.message = failure.message;
    reports.push_back(std::move(player.report));
  }
  return reports;
}

void Reference::wrap() {
  for (std::size_t r = 1; r < players_.size(); ++r) {
    const auto ignored = players_[r].model->ignored_names();
    const auto copy = [&](const auto& to, const auto& from) {
      for (const auto& item : to) {
        if (std::find(ignored.begin(), ignored.end(), item.key()) == ignored.end())
          overwrite(item.value(), from[item.key()]);
      }
    };
    copy(players_[r].model->named_parameters(), players_[0].model->named_parameters());
    copy(players_[r].model->named_buffers(), players_[0].model->named_buffers());
  }
}

void Reference::make_optimizers() {
  for (Player& player : players_)
    player.optimizer = make_torch_optimizer(drawn_.optimizer, optimizer_parameters(*player.model, false));
  // A new sharded optimizer has no gradient slices yet.
  if (wraps_with_optimizer(drawn_)) drop_gradients();
  set_rates();
}

void Reference::set_rates() {
  if (!drawn_.optimizer.schedule) return;
  for (Player& player : players_) {
    auto& groups = player.optimizer->param_groups();
    for (std::size_t g = 0; g < groups.size(); ++g)
      groups[g].options().set_lr(base_rate(drawn_.optimizer, g) * schedule_factor(steps_));
  }
}

void Reference::step() {
  if (drawn_.optimizer.scaler && overflowed()) {
    scale_ *= 0.5;
    return;
  }
  if (!updates_in_backward(drawn_)) update();
  ++steps_;
  set_rates();
}

void Reference::update() {
  const torch::NoGradGuard no_grad;
  const bool ascends = drawn_.optimizer.maximize && drawn_.optimizer.engine != "torch";
  // A gradient scaler leaves unscaled gradients, unless the optimizer unscales on read.
  const bool restores = drawn_.optimizer.engine != "torch";
  const double factor = (ascends ? -1 : 1) / scale_;
  for (Player& player : players_) {
    for (const at::Tensor& parameter : player.model->distinct_parameters())
      if (factor != 1 && parameter.grad().defined()) parameter.mutable_grad().mul_(factor);
    player.optimizer->step();
    // torch::optim::SGD does not notify autograd; Python's and ddpkit's optimizers do.
    for (const auto& group : player.optimizer->param_groups())
      for (const at::Tensor& parameter : group.params())
        if (restores && parameter.grad().defined()) parameter.unsafeGetTensorImpl()->bump_version();
    for (const at::Tensor& parameter : player.model->distinct_parameters())
      if (factor != 1 && restores && parameter.grad().defined()) parameter.mutable_grad().mul_(1 / factor);
  }
  if (drawn_.optimizer.engine == "sharded") drop_gradients();
}

void Reference::join(const Event& event) {
  const int most = *std::max_element(event.counts.begin(), event.counts.end());
  for (int k = 0; k < most; ++k) {
    std::vector<bool> active;
    for (const int count : event.counts) active.push_back(k < count);
    const auto first = static_cast<std::size_t>(std::find(active.begin(), active.end(), true) - active.begin());
    share_buffers(first);
    drop_gradients();
    backward(forward(active, event), false);
    average(event.how == "active" ? std::count(active.begin(), active.end(), true) : drawn_.world);
    if (updates_in_backward(drawn_)) update();
    step();
  }
  const auto longest =
      static_cast<std::size_t>(std::max_element(event.counts.begin(), event.counts.end()) - event.counts.begin());
  copy_buffers(longest);
  drop_gradients();
  graphs_.erase(0);
}

void Reference::perform(const Event& event) {
  const bool changed = changes_model(event);
  for (std::size_t r = 0; r < players_.size() && changed; ++r)
    change_model(*players_[r].model, event, static_cast<int>(r));
  if (changed || replaces(event)) graphs_.clear();
  const std::vector<bool> all(players_.size(), true);
  if (event.kind == "zero") {
    if (event.how == "hold")
      for (Player& player : players_) player.model->hold_gradients();
    drop_gradients();
  } else if (event.kind == "forward") {
    const bool eval = event.how == "eval";
    for (Player& player : players_) player.model->train(!eval);
    if (!is_local(event)) share_buffers(0);
    graphs_[event.slots.at(0)] = forward(all, event);
    for (Player& player : players_) player.model->train();
  } else if (event.kind == "backward") {
    Outputs sums(players_.size());
    for (const int slot : event.slots) {
      const auto found = graphs_.find(slot);
      if (found == graphs_.end()) continue;
      for (std::size_t r = 0; r < sums.size(); ++r)
        sums[r] = sums[r].defined() ? sums[r] + found->second[r] : found->second[r];
    }
    if (sums[0].defined() && sums[0].requires_grad()) {
      backward(sums, event.how == "retain");
      has_gradients_ = !is_local(event);
      if (has_gradients_) average(drawn_.world);
      if (has_gradients_ && updates_in_backward(drawn_)) update();
    }
    report_all(reports_gradients(drawn_, event), is_local(event) ? Kind::kLocal : Kind::kGradient);
    return;
  } else if (event.kind == "throw") {
    perform_throw(event);
  } else if (event.kind == "clip") {
    clip(event);
  } else if (event.kind == "step") {
    if (wants_step(drawn_, event, has_gradients_, norm_)) step();
  } else if (event.kind == "wrap_again") {
    wrap();
    if (wraps_with_optimizer(drawn_)) make_optimizers();
  } else if (event.kind == "optimizer_again") {
    make_optimizers();
  } else if (event.kind == "join") {
    join(event);
  } else if (!changed && event.kind != "save_load" && event.kind != "add_group" && event.kind != "hook") {
    throw std::invalid_argument("a case has no event \"" + event.kind + "\"");
  }
  report_all(false, Kind::kLocal);
}

void Reference::perform_throw(const Event& event) {
  share_buffers(0);
  forward(std::vector<bool>(players_.size(), true), event);
  if (ends_program(event)) throw Model::Thrown();
  drop_gradients();
}

void Reference::report_all(bool gradients, Kind gradient) {
  for (Player& player : players_) {
    report_model(player.report, event_, *player.model, gradients, gradient);
    if (drawn_.events[event_].kind == "step") report_state(player.report, event_, *player.optimizer, *player.model);
  }
}

std::vector<Report> run_reference(const Case& drawn, std::uint64_t run) { return Reference(drawn, run).run(); }

}  // namespace ddpkit::fuzz
