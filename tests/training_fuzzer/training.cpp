#include "training.h"

#include <algorithm>
#include <cmath>
#include <set>

#include <ddpkit/error.h>

#include "optimizers.h"

namespace ddpkit::fuzz {
namespace {

void write_through_pointer(const at::Tensor& parameter) {
  AT_DISPATCH_FLOATING_TYPES(parameter.scalar_type(), "write", [&] {
    auto* data = static_cast<scalar_t*>(parameter.data_ptr());
    for (std::int64_t i = 0; i < parameter.numel(); ++i) data[i] *= scalar_t(0.75);
  });
}

}  // namespace

bool changes_model(const Event& event) {
  static const std::set<std::string> kinds{"freeze", "unfreeze", "set_layout", "write", "cast", "edit_gradients"};
  return kinds.contains(event.kind);
}

void change_model(Model& model, const Event& event, int rank) {
  if (event.kind == "cast") return model.cast(at::kFloat);
  if (event.kind == "edit_gradients") {
    const torch::NoGradGuard no_grad;
    for (const at::Tensor& parameter : model.distinct_parameters()) {
      at::Tensor& gradient = parameter.mutable_grad();
      if (!gradient.defined()) continue;
      if (event.how == "replace")
        gradient = gradient * 0.5;
      else
        gradient.mul_(0.5);
    }
    return;
  }
  const bool freeze = event.kind == "freeze";
  const torch::NoGradGuard no_grad;
  const auto node = static_cast<std::size_t>(event.node);
  if (event.kind == "set_layout") {
    if (event.rank < 0 || event.rank == rank) model.set_layout(node, event.how);
  } else if (event.kind == "write" && event.how == "flat") {
    if (model.flat.defined()) model.flat.mul_(0.75);
  } else {
    for (const at::Tensor& parameter : model.parameters_of(node)) {
      if (event.kind != "write")
        parameter.set_requires_grad(!freeze);
      else if (event.how == "pointer" && !parameter.is_complex() && parameter.element_size() >= 4 &&
               parameter.is_non_overlapping_and_dense())
        write_through_pointer(parameter);
      else
        parameter.mul_(0.75);
    }
  }
}

bool reports_gradients(const Case& drawn, const Event& event) {
  const auto normalises = [](const Node& node) { return node.kind == "sync_batch_norm"; };
  return drawn.optimizer.engine != "sharded" &&
         !(is_local(event) && std::any_of(drawn.nodes.begin(), drawn.nodes.end(), normalises));
}

bool hides_weights(const Case& drawn, const Event& event) {
  if (is_fully_sharded(drawn) && drawn.wrapper.scope == "gathering")
    return event.kind == "forward" || event.kind == "backward";
  return updates_in_backward(drawn) && event.kind == "backward";
}

void report_model(Report& report, std::uint32_t event, Model& model, bool gradients, Kind gradient) {
  const auto ignored = model.ignored_names();
  const auto is_ignored = [&](const std::string& name) {
    return std::find(ignored.begin(), ignored.end(), name) != ignored.end();
  };
  const bool hidden = hides_weights(model.drawn(), model.drawn().events[event]);
  for (const auto& item : model.named_parameters()) {
    const bool own = is_ignored(item.key());
    if (!hidden) report_tensor(report, event, own ? Kind::kLocal : Kind::kWeight, "weight " + item.key(), item.value());
    if (gradients)
      report_tensor(report, event, own ? Kind::kLocal : gradient, "gradient " + item.key(), item.value().grad());
  }
  for (const auto& item : model.named_buffers())
    report_tensor(report, event, Kind::kLocal, "buffer " + item.key(), item.value());
  for (const auto& [name, gradient] : model.held) report_tensor(report, event, Kind::kLocal, "held " + name, gradient);
}

std::vector<at::Tensor> optimizer_parameters(Model& model, bool as_listed) {
  const OptimizerChoice& choice = model.drawn().optimizer;
  // torch::optim updates a parameter twice if it is listed twice; the program must avoid this.
  // Only within one group: the reference cannot know the group of a tensor's second entry.
  const bool listed_twice = as_listed && choice.engine == "fused" && choice.groups == 1;
  const auto all = listed_twice ? model.parameters() : model.distinct_parameters();
  if (choice.engine != "sharded") return all;
  std::vector<at::Tensor> averaged;
  for (const auto& item : model.named_parameters()) {
    const auto ignored = model.ignored_names();
    // A layer that is enabled later must be trained. The reference only does not know its group.
    const bool off = !item.value().requires_grad() && (as_listed || choice.groups > 1);
    if (off || std::find(ignored.begin(), ignored.end(), item.key()) != ignored.end()) continue;
    if (std::none_of(averaged.begin(), averaged.end(), [&](const auto& one) { return one.is_same(item.value()); }))
      averaged.push_back(item.value());
  }
  return averaged;
}

bool wants_step(const Case& drawn, const Event& event, bool has_gradients, double norm) {
  if (!has_gradients && !updates_in_backward(drawn)) return false;
  return event.how != "if_finite" || drawn.optimizer.scaler || std::isfinite(norm);
}

void note_failure(Report& report, std::uint32_t event, const std::function<void()>& action) {
  const auto note = [&](Failure failure, const std::exception& error) {
    report.failure = failure;
    report.failed_event = event;
    report.message = error.what();
  };
  try {
    action();
  } catch (const PeerLost& error) {
    note(Failure::kPeerLost, error);
  } catch (const Timeout& error) {
    note(Failure::kTimeout, error);
  } catch (const Error& error) {
    note(Failure::kDdpkit, error);
  } catch (const c10::Error& error) {
    report.failure = Failure::kOther;
    report.failed_event = event;
    report.message = error.what_without_backtrace();
  } catch (const std::exception& error) {
    note(Failure::kOther, error);
  }
}

}  // namespace ddpkit::fuzz
