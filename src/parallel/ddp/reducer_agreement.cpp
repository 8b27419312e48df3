// What the ranks agree on when the model is wrapped, and whether it still holds. Messages follow the agreement.
#include "parallel/ddp/reducer_impl.h"

#include <ATen/ATen.h>
#include <c10/util/strides.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

namespace ddpkit {

void Reducer::Impl::note_agreement() {
  for (const NamedParameter& parameter : parameters_) {
    const at::Tensor& tensor = parameter.tensor;
    agreed_.push_back({tensor.scalar_type(), tensor.device(), tensor.sizes().vec()});
  }
}

/// Not collective: each rank compares its parameters with what all ranks had at wrapping, and tells the others.
void Reducer::Impl::check_agreement() const {
  const auto fail = [&](const std::string& text) {
    group_.abort(text);
    throw ModelMismatch(text, {.rank = group_.rank(), .call = "forward"});
  };
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    const Agreed& agreed = agreed_[i];
    if (tensor.scalar_type() == agreed.dtype && tensor.device() == agreed.device &&
        tensor.sizes() == at::IntArrayRef(agreed.sizes))
      continue;
    const auto kind = [](at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
      return fmt::format("[{}] {} on {}", fmt::join(sizes, ", "), c10::toString(dtype), device.str());
    };
    fail(
        fmt::format("parameter {} is {} on rank {}, but was {} when the model was wrapped: convert, move or resize a "
                    "model before wrapping, or wrap it again on all ranks",
                    parameters_[i].name, kind(tensor.sizes(), tensor.scalar_type(), tensor.device()), group_.rank(),
                    kind(agreed.sizes, agreed.dtype, agreed.device)));
  }
  for (const NamedParameter& parameter : frozen_) {
    if (parameter.tensor.requires_grad())
      fail(
          fmt::format("requires_grad of parameter {} is true on rank {}, but was false when the model was wrapped: its "
                      "gradient would not be averaged. Wrap the model again on all ranks after unfreezing parameters",
                      parameter.name, group_.rank()));
  }
}

/// In which each dense gradient's elements are ordered in messages: rank 0's, the same on all ranks. Collective.
GradientMemory::Strides Reducer::Impl::agree_on_strides() const {
  std::vector<std::int64_t> numbers;
  for (std::size_t i = 0; i < dense_; ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    // Those that AccumulateGrad prefers.
    const bool dense = tensor.is_non_overlapping_and_dense();
    const at::DimVector strides = dense ? at::DimVector(tensor.strides()) : c10::contiguous_strides(tensor.sizes());
    numbers.insert(numbers.end(), strides.begin(), strides.end());
  }
  at::Tensor agreed = at::tensor(numbers, at::kLong);
  if (group_.world_size() > 1 && !numbers.empty()) {
    const at::Tensor message = agreed.to(group_.device());
    group_.broadcast(message);
    agreed = message.cpu();
  }
  GradientMemory::Strides strides;
  const auto* next = agreed.const_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < dense_; ++i) {
    const std::int64_t dims = parameters_[i].tensor.dim();
    strides.emplace_back(next, next + dims);
    next += dims;
  }
  return strides;
}

/// A sink's slices are cut in the order of the parameters' memory, which is the same on all ranks. Collective.
void Reducer::Impl::follow_strides() {
  for (std::size_t i = 0; i < dense_; ++i) {
    if (parameters_[i].tensor.strides() != memory_->strides(i)) return lay_out();
  }
}

}  // namespace ddpkit
