#include "parallel/ddp/used_parameters.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

namespace ddpkit {

UsedParameters::UsedParameters(const std::vector<NamedParameter>& parameters, ProcessGroup group, UnusedPolicy policy)
    : parameters_(parameters),
      group_(std::move(group)),
      policy_(policy),
      reachable_(parameters.size()),
      used_since_sync_(parameters.size()),
      arrivals_(parameters.size()),
      expected_(parameters.size(), 1),
      in_graph_(parameters.size(), 1) {}

bool UsedParameters::find(const std::vector<at::Tensor>& outputs, const GradientHooks& hooks) {
  if (!outputs_known_) reachable_.assign(parameters_.size(), false);
  outputs_known_ = true;
  hidden_forwards_ = 0;
  bool shows_parameters = false;
  visit_graph(outputs, [&](torch::autograd::Node* node) {
    if (const auto param = hooks.leaf_of(node)) reachable_[*param] = shows_parameters = true;
    return policy_ == UnusedPolicy::kFind || !shows_parameters;
  });
  // Checkpoints hide their parameters, so buckets wait for all parameters.
  if (!shows_parameters) reachable_.assign(parameters_.size(), true);
  return shows_parameters;
}

void UsedParameters::begin_backward() {
  std::fill(arrivals_.begin(), arrivals_.end(), 0);
  if (policy_ == UnusedPolicy::kFind && outputs_known_) {
    expected_.assign(reachable_.begin(), reachable_.end());
  } else {
    expected_ = in_graph_;
  }
}

void UsedParameters::begin_shadow() {
  std::fill(arrivals_.begin(), arrivals_.end(), 0);
  std::fill(expected_.begin(), expected_.end(), 0);
  std::fill(used_since_sync_.begin(), used_since_sync_.end(), false);
}

void UsedParameters::add(std::size_t param, std::optional<std::size_t> bucket) {
  ++arrivals_[param];
  const int most = graph_known_ ? expected_[param] : std::max(expected_[param], 1);
  if (!learns_graph() && arrivals_[param] > most) throw_ready_twice(param, bucket);
}

/// The message ends with the number of forward passes and its complement. Their maxima give the highest and the lowest
/// number of all ranks.
void UsedParameters::agree(bool has_inputs) {
  const bool on_device = !group_.device().is_cpu();
  const std::size_t count = parameters_.size();
  // Pinned: from pageable memory, the copy to the device would make the host wait.
  const at::Tensor here =
      at::zeros({static_cast<std::int64_t>(count) + 2}, at::TensorOptions(at::kByte).pinned_memory(on_device));
  auto* used = here.data_ptr<std::uint8_t>();
  for (std::size_t i = 0; i < count; ++i) {
    // An earlier backward has used the parameter, and the program may have reset the gradient since.
    used[i] = used_since_sync_[i] && (arrivals_[i] > 0 || parameters_[i].tensor.grad().defined());
  }
  if (has_inputs) {
    used[count] = static_cast<std::uint8_t>(hidden_forwards_);
    used[count + 1] = static_cast<std::uint8_t>(~hidden_forwards_);
  }
  const at::Tensor anywhere = here.to(group_.device(), /*non_blocking=*/on_device);
  group_.all_reduce(anywhere, ReduceOp::kMax);
  // A rank that used all parameters knows the answer and does not wait for the device.
  const bool all = std::all_of(used, used + count, [](std::uint8_t one) { return one != 0; });
  globally_used_ = all && hidden_forwards_ == 0 ? here : anywhere.cpu();
  group_.check();
  check_forwards();
}

/// If the forward pass's output hides its tensors, a backward that uses no parameter is not detected on this rank. The
/// others then wait for its next backward, which belongs to another step.
void UsedParameters::check_forwards() const {
  const auto* numbers = globally_used_.const_data_ptr<std::uint8_t>() + parameters_.size();
  const int most = numbers[0], least = 255 - numbers[1];
  if (most == least) return;
  throw Error(fmt::format("up to {} forward passes ran on a rank since the last averaged backward, and {} on another. "
                          "A rank used no parameter in a backward, and DistributedDataParallel cannot find the tensors "
                          "in the output of forward. Return tensors, or write output_tensors() for the output's type",
                          most, least),
              {.rank = group_.rank(), .call = "backward"});
}

void UsedParameters::learn_graph() {
  in_graph_ = arrivals_;
  graph_known_ = true;
}

bool UsedParameters::used_anywhere(std::size_t param) const {
  return policy_ == UnusedPolicy::kError || globally_used_.const_data_ptr<std::uint8_t>()[param] != 0;
}

void UsedParameters::end_backward() {
  std::fill(used_since_sync_.begin(), used_since_sync_.end(), false);
  hidden_forwards_ = 0;
}

void UsedParameters::check_complete(std::size_t bucket) const {
  if (!must_be_complete()) return;
  std::vector<std::string> names;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (arrivals_[i] < expected_[i]) names.push_back(parameters_[i].name);
  }
  if (names.empty()) return;
  const std::size_t count = names.size();
  if (count > 10) {
    names.resize(10);
    names.push_back("...");
  }
  const std::string advice =
      policy_ == UnusedPolicy::kStaticGraph
          ? "static_graph promises that each backward uses the same parameters as the first one did, and as often"
          : "Every parameter that wants a gradient must take part in the loss on every rank; switch the others off "
            "with requires_grad_(false) before wrapping the model, or set find_unused_parameters";
  const std::string text = fmt::format("backward on rank {} gave no gradient to {} of {} parameters: {}. {}",
                                       group_.rank(), count, parameters_.size(), fmt::join(names, ", "), advice);
  group_.abort(text);
  throw Error(text, {.rank = group_.rank(), .call = "backward", .bucket = bucket});
}

void UsedParameters::throw_late(std::size_t param, std::size_t bucket) const {
  throw Error(fmt::format("parameter {} got a gradient though no output of forward comes from it, after its bucket was "
                          "reduced without it: find_unused_parameters and static_graph need the parameters that take "
                          "part in the loss to be used in forward (and the same ones each time)",
                          parameters_[param].name),
              {.rank = group_.rank(), .call = "backward", .bucket = bucket});
}

void UsedParameters::throw_ready_twice(std::size_t param, std::optional<std::size_t> bucket) const {
  const std::string& name = parameters_[param].name;
  std::string text;
  if (graph_known_ && in_graph_[param] == 0) {
    text = fmt::format(
        "parameter {} got a gradient on rank {}, but none in the first backward. static_graph promises that each "
        "backward is like the first one. Wrap the model again after a change, such as of requires_grad",
        name, group_.rank());
  } else if (graph_known_) {
    text = fmt::format(
        "parameter {} was marked ready twice: gradient number {} came in one backward, and the first backward had {}. "
        "static_graph promises that each backward is like the first one",
        name, arrivals_[param], in_graph_[param]);
  } else {
    text = fmt::format(
        "parameter {} was marked ready twice: a second gradient came in one backward. Backwards within backward, such "
        "as reentrant checkpoints, share the parameter. Set static_graph if the graph is the same in each step, or use "
        "the parameter in one checkpoint only",
        name);
  }
  throw Error(text, {.rank = group_.rank(), .call = "backward", .bucket = bucket});
}

}  // namespace ddpkit
