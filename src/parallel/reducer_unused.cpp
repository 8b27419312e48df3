#include "parallel/reducer_impl.h"

#include <ATen/ATen.h>

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/comm/error.h>

namespace ddpkit {

/// Which parameters were used on some rank. Collective.
void Reducer::Impl::agree_on_used() {
  const bool on_device = seen_.has_streams();
  const auto count = static_cast<std::int64_t>(slots_.size());
  // Pinned: from pageable memory the copy to the device would make the host wait.
  const at::Tensor here = at::empty({count}, at::TensorOptions(at::kByte).pinned_memory(on_device));
  auto* used = here.data_ptr<std::uint8_t>();
  used_here_.clear();
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    used[i] = slots_[i].used;
    used_here_.push_back(slots_[i].used);
  }
  const at::Tensor anywhere = here.to(group_.device(), /*non_blocking=*/on_device);
  group_.all_reduce(anywhere, ReduceOp::kMax);
  // A rank that has used all knows the answer, and does not wait for the device to bring it.
  const bool all = std::all_of(used_here_.begin(), used_here_.end(), [](bool one) { return one; });
  used_anywhere_ = all ? here : anywhere.cpu();
}

void Reducer::Impl::throw_incomplete() {
  std::vector<std::string> names;
  for (const Slot& slot : slots_) {
    if (!slot.fired && slot.expected) names.push_back(slot.parameter.name);
  }
  const std::size_t count = names.size();
  if (count > 10) {
    names.resize(10);
    names.push_back("...");
  }
  const std::string advice =
      options_.static_graph ? "static_graph promises that each backward uses the same parameters as the first one did"
                            : "Every parameter that wants a gradient must take part in the loss on every rank; switch "
                              "the others off with "
                              "requires_grad_(false) before wrapping the model, or set find_unused_parameters";
  const std::string text = fmt::format("backward on rank {} gave no gradient to {} of {} parameters: {}. {}",
                                       group_.rank(), count, slots_.size(), fmt::join(names, ", "), advice);
  group_.abort(text);
  throw Error(text, {.rank = group_.rank(), .call = "backward", .bucket = next_bucket_});
}

/// The last backward was made of backwards within others, and none of them was known to be the last.
void Reducer::Impl::throw_unfinished() {
  if (must_be_complete()) throw_incomplete();
  const std::string text = fmt::format(
      "backward on rank {} has not ended: a backward within another one (a checkpoint) brought its last gradient, and "
      "with find_unused_parameters or static_graph the end of the outer one is seen only where forward returns "
      "tensors, or what they can be found in (ddpkit/parallel/outputs.h)",
      group_.rank());
  group_.abort(text);
  throw Error(text, {.rank = group_.rank(), .call = "backward"});
}

}  // namespace ddpkit
