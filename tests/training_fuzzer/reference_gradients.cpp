#include <ATen/autocast_mode.h>

#include <algorithm>
#include <cmath>

#include "reference.h"

namespace ddpkit::fuzz {
namespace {

/// Enables LibTorch's autocast on the CPU.
class MixedPrecision {
 public:
  explicit MixedPrecision(const std::string& type) : enabled_(!type.empty()) {
    if (!enabled_) return;
    at::autocast::set_autocast_dtype(at::kCPU, type_named(type));
    at::autocast::set_autocast_enabled(at::kCPU, true);
  }
  ~MixedPrecision() {
    if (!enabled_) return;
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
  }
  MixedPrecision(const MixedPrecision&) = delete;
  MixedPrecision& operator=(const MixedPrecision&) = delete;

 private:
  bool enabled_;
};

}  // namespace

void Reference::share_buffers(std::size_t source) {
  // DataParallel's replicas use the module's buffers in evaluation mode too.
  const bool wanted = drawn_.wrapper.kind == "data_parallel" || players_[0].model->is_training();
  if (!drawn_.wrapper.broadcast_buffers || !wanted) return;
  copy_buffers(source);
}

void Reference::copy_buffers(std::size_t source) {
  const auto from = players_[source].model->named_buffers();
  for (Player& player : players_) {
    const auto ignored = player.model->ignored_names();
    for (const auto& item : player.model->named_buffers()) {
      if (&player != &players_[source] && std::find(ignored.begin(), ignored.end(), item.key()) == ignored.end())
        overwrite(item.value(), from[item.key()]);
    }
  }
}

Reference::Outputs Reference::forward(const std::vector<bool>& active, const Event& event) {
  Outputs x(players_.size());
  std::vector<Batch> batches;
  for (std::size_t r = 0; r < players_.size(); ++r) {
    batches.push_back(make_batch(drawn_, batch_, static_cast<int>(r)));
    if (poisons(event, static_cast<int>(r))) batches[r].x = batches[r].x * INFINITY;
    if (active[r]) x[r] = players_[r].model->input(batches[r]);
  }
  ++batch_;
  const MixedPrecision mixed_precision(drawn_.autocast);
  for (std::size_t i = 0; i < drawn_.nodes.size(); ++i) {
    if (drawn_.nodes[i].kind == "sync_batch_norm" && players_[0].model->is_training()) {
      normalise_together(i, x, batches);
      continue;
    }
    for (std::size_t r = 0; r < players_.size(); ++r)
      if (active[r]) x[r] = disturbed(players_[r].model->run(i, x[r], batches[r]), disturbance_.values);
  }
  for (std::size_t r = 0; r < players_.size(); ++r)
    if (active[r]) x[r] = loss_of(drawn_, Model::output(x[r]), batches[r]);
  return x;
}

void Reference::normalise_together(std::size_t node, Outputs& x, const std::vector<Batch>& batches) {
  Outputs present;
  for (const at::Tensor& one : x)
    if (one.defined()) present.push_back(one);
  std::size_t first = 0;
  while (!x[first].defined()) ++first;
  const at::Tensor all = players_[first].model->run(node, torch::cat(present), batches[first]);
  const auto parts = disturbed(all, disturbance_.values).split(drawn_.rows);
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

void Reference::backward(const Outputs& losses, bool retain) {
  std::vector<at::Tensor> roots;
  for (const at::Tensor& loss : losses)
    if (loss.defined() && loss.requires_grad()) roots.push_back(loss * scale_);
  if (!roots.empty()) torch::autograd::backward(roots, {}, retain);
}

at::Tensor Reference::disturbed(const at::Tensor& x, double relative) {
  if (relative == 0) return x;
  const at::Tensor signs = 2 * at::randint(0, 2, x.sizes(), generator_, at::kDouble) - 1;
  return x * (1 + relative * signs).to(x.is_complex() ? at::toRealValueType(x.scalar_type()) : x.scalar_type());
}

void Reference::average(std::int64_t divisor) {
  const torch::NoGradGuard no_grad;
  std::vector<std::vector<at::Tensor>> parameters;
  for (Player& player : players_) parameters.push_back(averaged(*player.model));
  for (std::size_t i = 0; i < parameters[0].size(); ++i) {
    at::Tensor sum;
    for (auto& own : parameters) {
      const at::Tensor& gradient = own[i].grad();
      if (!gradient.defined()) continue;
      // The ranks' large gradients may cancel.
      const at::Tensor wide =
          disturbed(gradient.to(gradient.is_complex() ? at::kComplexDouble : at::kDouble), disturbance_.gradients);
      sum = sum.defined() ? sum + wide : wide;
    }
    if (!sum.defined()) continue;
    sum = sum / static_cast<double>(divisor);
    for (auto& own : parameters) own[i].mutable_grad() = sum.to(own[i].scalar_type()).clone();
  }
}

std::vector<at::Tensor> Reference::averaged(Model& model) {
  const auto ignored = model.ignored_names();
  std::vector<at::Tensor> result;
  for (const auto& item : model.named_parameters()) {
    if (std::find(ignored.begin(), ignored.end(), item.key()) != ignored.end()) continue;
    if (std::none_of(result.begin(), result.end(), [&](const auto& one) { return one.is_same(item.value()); }))
      result.push_back(item.value());
  }
  return result;
}

void Reference::drop_gradients() {
  has_gradients_ = false;
  for (Player& player : players_)
    for (const at::Tensor& parameter : player.model->parameters()) parameter.mutable_grad().reset();
}

void Reference::clip(const Event& event) {
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

bool Reference::overflowed() {
  for (Player& player : players_)
    for (const at::Tensor& parameter : player.model->parameters())
      if (parameter.grad().defined() && !parameter.grad().isfinite().all().item<bool>()) return true;
  return false;
}

}  // namespace ddpkit::fuzz
