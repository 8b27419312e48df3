// One process without ddpkit plays all ranks: a model and an optimizer of LibTorch's for each, gradients averaged by
// hand.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "optimizers.h"
#include "training.h"

namespace ddpkit::fuzz {
namespace {

struct Player {
  std::shared_ptr<Model> model = {};
  std::unique_ptr<torch::optim::Optimizer> optimizer = {};
  Report report = {};
};

/// Not copy_(): as if nobody had written to the tensor, which autograd must not object to.
void overwrite(const at::Tensor& to, const at::Tensor& from) {
  if (to.is_contiguous() && from.is_contiguous()) {
    std::memcpy(to.data_ptr(), from.const_data_ptr(), from.nbytes());
  } else {
    const torch::NoGradGuard no_grad;
    to.copy_(from);
  }
}

class Reference {
 public:
  explicit Reference(const Case& drawn) : drawn_(drawn), scale_(drawn.optimizer.scaler ? kLossScale : 1) {
    for (int rank = 0; rank < drawn.world; ++rank)
      players_.push_back({.model = std::make_shared<Model>(drawn, rank, std::nullopt, true)});
    wrap();
    make_optimizers();
  }

  std::vector<Report> run() {
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

 private:
  using Outputs = std::vector<at::Tensor>;  // [rank]

  /// Everybody starts from rank 0's weights and buffers.
  void wrap() {
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

  void make_optimizers() {
    for (Player& player : players_)
      player.optimizer = make_torch_optimizer(drawn_.optimizer, optimizer_parameters(*player.model, false));
    // A new sharded optimizer has no slices of gradients yet.
    if (drawn_.optimizer.engine == "sharded") drop_gradients();
    set_rates();
  }

  void set_rates() {
    if (!drawn_.optimizer.schedule) return;
    for (Player& player : players_) {
      auto& groups = player.optimizer->param_groups();
      for (std::size_t g = 0; g < groups.size(); ++g)
        groups[g].options().set_lr(base_rate(drawn_.optimizer, g) * schedule_factor(steps_));
    }
  }

  void share_buffers(std::size_t source) {
    // DataParallel's replicas take the module's buffers in evaluation mode too.
    const bool wanted = drawn_.wrapper.kind == "data_parallel" || players_[0].model->is_training();
    if (!drawn_.wrapper.broadcast_buffers || !wanted) return;
    for (Player& player : players_) {
      const auto ignored = player.model->ignored_names();
      const auto from = players_[source].model->named_buffers();
      for (const auto& item : player.model->named_buffers()) {
        if (&player != &players_[source] && std::find(ignored.begin(), ignored.end(), item.key()) == ignored.end())
          overwrite(item.value(), from[item.key()]);
      }
    }
  }

  /// Layer by layer in step, since sync_batch_norm sees all ranks' inputs. Undefined for ranks that are not active.
  Outputs forward(const std::vector<bool>& active, const Event& event) {
    Outputs x(players_.size());
    std::vector<Batch> batches;
    for (std::size_t r = 0; r < players_.size(); ++r) {
      batches.push_back(make_batch(drawn_, batch_, static_cast<int>(r)));
      if (poisons(event, static_cast<int>(r))) batches[r].x = batches[r].x * INFINITY;
      if (active[r]) x[r] = players_[r].model->input(batches[r]);
    }
    ++batch_;
    for (std::size_t i = 0; i < drawn_.nodes.size(); ++i) {
      if (drawn_.nodes[i].kind == "sync_batch_norm" && players_[0].model->is_training()) {
        normalise_together(i, x, batches);
        continue;
      }
      for (std::size_t r = 0; r < players_.size(); ++r)
        if (active[r]) x[r] = players_[r].model->run(i, x[r], batches[r]);
    }
    for (std::size_t r = 0; r < players_.size(); ++r)
      if (active[r]) x[r] = loss_of(drawn_, x[r], batches[r]);
    return x;
  }

  void normalise_together(std::size_t node, Outputs& x, const std::vector<Batch>& batches) {
    Outputs present;
    for (const at::Tensor& one : x)
      if (one.defined()) present.push_back(one);
    std::size_t first = 0;
    while (!x[first].defined()) ++first;
    const auto parts = players_[first].model->run(node, torch::cat(present), batches[first]).split(drawn_.rows);
    std::size_t next = 0;
    for (at::Tensor& one : x)
      if (one.defined()) one = parts[next++];
    const std::string prefix = "n" + std::to_string(node) + ".";
    const auto from = players_[first].model->named_buffers();
    for (std::size_t r = 0; r < players_.size(); ++r) {
      if (r == first || !x[r].defined()) continue;
      for (const auto& item : players_[r].model->named_buffers())
        if (item.key().rfind(prefix, 0) == 0) overwrite(item.value(), from[item.key()]);
    }
  }

  void backward(const Outputs& losses, bool retain) {
    std::vector<at::Tensor> roots;
    for (const at::Tensor& loss : losses)
      if (loss.defined() && loss.requires_grad()) roots.push_back(loss * scale_);
    if (!roots.empty()) torch::autograd::backward(roots, {}, retain);
  }

  /// Ranks without a gradient give zeros; where none has one there is none.
  void average() {
    const torch::NoGradGuard no_grad;
    std::vector<std::vector<at::Tensor>> parameters;
    for (Player& player : players_) parameters.push_back(averaged(*player.model));
    for (std::size_t i = 0; i < parameters[0].size(); ++i) {
      at::Tensor sum;
      for (auto& own : parameters) {
        const at::Tensor& gradient = own[i].grad();
        if (!gradient.defined()) continue;
        const at::Tensor wide = gradient.to(gradient.is_complex() ? at::kComplexDouble : at::kDouble);
        sum = sum.defined() ? sum + wide : wide;
      }
      if (!sum.defined()) continue;
      sum = sum / static_cast<double>(players_.size());
      for (auto& own : parameters) own[i].mutable_grad() = sum.to(own[i].scalar_type()).clone();
    }
  }

  static std::vector<at::Tensor> averaged(Model& model) {
    const auto ignored = model.ignored_names();
    std::vector<at::Tensor> result;
    for (const auto& item : model.named_parameters()) {
      if (std::find(ignored.begin(), ignored.end(), item.key()) != ignored.end()) continue;
      if (std::none_of(result.begin(), result.end(), [&](const auto& one) { return one.is_same(item.value()); }))
        result.push_back(item.value());
    }
    return result;
  }

  void drop_gradients() {
    has_gradients_ = false;
    for (Player& player : players_)
      for (const at::Tensor& parameter : player.model->parameters()) parameter.mutable_grad().reset();
  }

  void clip(const Event& event) {
    if (!has_gradients_) return;
    const torch::NoGradGuard no_grad;
    const double type = event.node == 0 ? INFINITY : event.node;
    for (Player& player : players_) {
      double total = 0;
      for (const at::Tensor& parameter : player.model->distinct_parameters()) {
        if (!parameter.grad().defined() || parameter.numel() == 0) continue;
        const double norm =
            at::linalg_vector_norm(
                parameter.grad().to(parameter.is_complex() ? at::kComplexDouble : at::kDouble) / scale_, type)
                .item<double>();
        total = std::isinf(type) ? (norm > total || std::isnan(norm) ? norm : total) : total + std::pow(norm, type);
      }
      norm_ = std::isinf(type) ? total : std::pow(total, 1 / type);
      report_tensor(player.report, event_, Kind::kWeight, "norm", at::scalar_tensor(norm_, at::kDouble));
      const double factor = event.value / (norm_ + 1e-6);
      if (factor >= 1) continue;
      for (const at::Tensor& parameter : player.model->distinct_parameters())
        if (parameter.grad().defined()) parameter.mutable_grad().mul_(factor);
    }
  }

  bool overflowed() {
    for (Player& player : players_)
      for (const at::Tensor& parameter : player.model->parameters())
        if (parameter.grad().defined() && !parameter.grad().isfinite().all().item<bool>()) return true;
    return false;
  }

  /// An update within backward leaves only the count to step().
  void step() {
    if (drawn_.optimizer.scaler && overflowed()) {
      scale_ *= 0.5;
      return;
    }
    if (!updates_in_backward(drawn_)) update();
    ++steps_;
    set_rates();
  }

  void update() {
    const torch::NoGradGuard no_grad;
    const bool ascends = drawn_.optimizer.maximize && drawn_.optimizer.engine != "torch";
    // A gradient scaler leaves gradients unscaled behind, unless the optimizer unscales as it reads them.
    const bool restores = drawn_.optimizer.engine != "torch";
    const double factor = (ascends ? -1 : 1) / scale_;
    for (Player& player : players_) {
      for (const at::Tensor& parameter : player.model->distinct_parameters())
        if (factor != 1 && parameter.grad().defined()) parameter.mutable_grad().mul_(factor);
      player.optimizer->step();
      // torch::optim::SGD does not tell autograd; Python's and ddpkit's optimizers do.
      for (const at::Tensor& parameter : player.model->distinct_parameters())
        if (restores && parameter.grad().defined()) parameter.unsafeGetTensorImpl()->bump_version();
      for (const at::Tensor& parameter : player.model->distinct_parameters())
        if (factor != 1 && restores && parameter.grad().defined()) parameter.mutable_grad().mul_(1 / factor);
    }
    if (drawn_.optimizer.engine == "sharded") drop_gradients();
  }

  void join(const Event& event) {
    const int most = *std::max_element(event.counts.begin(), event.counts.end());
    for (int k = 0; k < most; ++k) {
      std::vector<bool> active;
      for (const int count : event.counts) active.push_back(k < count);
      const auto first = static_cast<std::size_t>(std::find(active.begin(), active.end(), true) - active.begin());
      share_buffers(first);
      drop_gradients();
      backward(forward(active, event), false);
      average();
      if (updates_in_backward(drawn_)) update();
      step();
    }
    const auto longest =
        static_cast<std::size_t>(std::max_element(event.counts.begin(), event.counts.end()) - event.counts.begin());
    for (Player& player : players_) {
      const auto ignored = player.model->ignored_names();
      const auto from = players_[longest].model->named_buffers();
      for (const auto& item : player.model->named_buffers())
        if (&player != &players_[longest] && std::find(ignored.begin(), ignored.end(), item.key()) == ignored.end())
          overwrite(item.value(), from[item.key()]);
    }
    drop_gradients();
    graphs_.erase(0);
  }

  void perform(const Event& event) {
    bool changed = true;
    for (std::size_t r = 0; r < players_.size(); ++r)
      changed = change_model(*players_[r].model, event, static_cast<int>(r));
    if (changed || replaces(event)) graphs_.clear();
    const std::vector<bool> all(players_.size(), true);
    if (event.kind == "zero") {
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
        if (has_gradients_) average();
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
      if (drawn_.optimizer.engine == "sharded") make_optimizers();
    } else if (event.kind == "optimizer_again") {
      make_optimizers();
    } else if (event.kind == "join") {
      join(event);
    } else if (!changed && event.kind != "save_load" && event.kind != "add_group" && event.kind != "hook") {
      throw std::invalid_argument("a case has no event \"" + event.kind + "\"");
    }
    report_all(false, Kind::kLocal);
  }

  /// All ranks catch it; what one alone throws ends its program.
  void perform_throw(const Event& event) {
    share_buffers(0);
    forward(std::vector<bool>(players_.size(), true), event);
    if (event.rank >= 0) throw Model::Thrown();
    drop_gradients();
  }

  void report_all(bool gradients, Kind gradient) {
    const bool sharded = drawn_.optimizer.engine == "sharded";
    for (Player& player : players_) {
      report_model(player.report, event_, *player.model, gradients, gradient);
      const Event& event = drawn_.events[event_];
      if (!sharded && event.kind == "step") report_state(player.report, event_, *player.optimizer, *player.model);
    }
  }

  const Case& drawn_;
  std::vector<Player> players_;    ///< [rank]
  std::map<int, Outputs> graphs_;  ///< Losses by slot.
  std::uint32_t event_ = 0;
  int batch_ = 0;
  std::int64_t steps_ = 0;
  double norm_ = 0;
  double scale_;
  bool has_gradients_ = false;  ///< Averaged ones, for a step.
};

}  // namespace

std::vector<Report> run_reference(const Case& drawn) { return Reference(drawn).run(); }

}  // namespace ddpkit::fuzz
