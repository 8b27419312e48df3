#include "parallel/ddp/reducer_impl.h"

#include <ATen/ATen.h>

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

#include "parallel/join_session.h"

namespace ddpkit {

/// Which parameters were used on some rank. Collective. The message ends with the number of forward passes and its
/// complement: their maxima show the highest and the lowest number of all ranks.
void Reducer::Impl::agree_on_used() {
  const bool on_device = seen_.has_streams();
  const std::size_t count = slots_.size();
  // Pinned: from pageable memory the copy to the device would make the host wait.
  const at::Tensor here =
      at::zeros({static_cast<std::int64_t>(count) + 2}, at::TensorOptions(at::kByte).pinned_memory(on_device));
  auto* used = here.data_ptr<std::uint8_t>();
  for (std::size_t i = 0; i < count; ++i) {
    const Slot& slot = slots_[i];
    // An earlier backward has used the parameter, and the program may have reset the gradient since.
    used[i] = slot.used && (slot.firings > 0 || slot.parameter.tensor.grad().defined());
  }
  if (!shadows_) {
    used[count] = static_cast<std::uint8_t>(unseen_forwards_);
    used[count + 1] = static_cast<std::uint8_t>(~unseen_forwards_);
  }
  const at::Tensor anywhere = here.to(group_.device(), /*non_blocking=*/on_device);
  group_.all_reduce(anywhere, ReduceOp::kMax);
  // A rank that has used all knows the answer, and does not wait for the device to bring it.
  const bool all = std::all_of(used, used + count, [](std::uint8_t one) { return one != 0; });
  used_anywhere_ = all && unseen_forwards_ == 0 ? here : anywhere.cpu();
  check_forwards();
  // In join(), a rank without inputs cannot learn the graph. All ranks learn it in the same backward.
  if (!options_.static_graph || (join_ && join_->active() < group_.world_size())) return;
  for (Slot& slot : slots_) slot.in_graph = slot.firings;
  graph_is_known_ = true;
}

/// If forward's output hides its tensors, a backward that uses no parameter passes unseen on this rank, and the others
/// wait for its next backward, of another step.
void Reducer::Impl::check_forwards() const {
  const auto* numbers = used_anywhere_.const_data_ptr<std::uint8_t>() + slots_.size();
  const int most = numbers[0], least = 255 - numbers[1];
  if (most == least) return;
  throw Error(fmt::format("up to {} forward passes ran on a rank since the last averaged backward, and {} on another. "
                          "A rank used no parameter in a backward, and DistributedDataParallel cannot find the tensors "
                          "in the output of forward. Return tensors, or write output_tensors() for the output's type",
                          most, least),
              {.rank = group_.rank(), .call = "backward"});
}

void Reducer::Impl::throw_incomplete() {
  std::vector<std::string> names;
  for (const Slot& slot : slots_) {
    if (slot.firings < slot.expected) names.push_back(slot.parameter.name);
  }
  const std::size_t count = names.size();
  if (count > 10) {
    names.resize(10);
    names.push_back("...");
  }
  const std::string advice =
      options_.static_graph
          ? "static_graph promises that each backward uses the same parameters as the first one did, and as often"
          : "Every parameter that wants a gradient must take part in the loss on every rank; switch "
            "the others off with "
            "requires_grad_(false) before wrapping the model, or set find_unused_parameters";
  const std::string text = fmt::format("backward on rank {} gave no gradient to {} of {} parameters: {}. {}",
                                       group_.rank(), count, slots_.size(), fmt::join(names, ", "), advice);
  group_.abort(text);
  throw Error(text, {.rank = group_.rank(), .call = "backward", .bucket = next_bucket_});
}

void Reducer::Impl::throw_ready_twice(const Slot& slot) const {
  if (graph_is_known_ && slot.in_graph == 0)
    throw Error(fmt::format("parameter {} got a gradient on rank {}, but none in the first backward. static_graph "
                            "promises that each backward is like the first one. Wrap the model again after a change, "
                            "such as of requires_grad",
                            slot.parameter.name, group_.rank()),
                {.rank = group_.rank(), .call = "backward", .bucket = slot.bucket});
  throw Error(
      graph_is_known_
          ? fmt::format("parameter {} was marked ready twice: gradient number {} came in one backward, and the first "
                        "backward had {}. static_graph promises that each backward is like the first one",
                        slot.parameter.name, slot.firings, slot.in_graph)
          : fmt::format("parameter {} was marked ready twice: a second gradient came in one backward. Backwards within "
                        "backward, such as reentrant checkpoints, share the parameter. Set static_graph if the graph "
                        "is the same in each step, or use the parameter in one checkpoint only",
                        slot.parameter.name),
      {.rank = group_.rank(), .call = "backward", .bucket = slot.bucket});
}

}  // namespace ddpkit
