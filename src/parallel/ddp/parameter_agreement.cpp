#include "parallel/ddp/parameter_agreement.h"

#include <ATen/ATen.h>
#include <c10/util/strides.h>

#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

namespace ddpkit {
namespace {

/// Collective. Rank 0's numbers.
std::vector<std::int64_t> numbers_of_rank_0(const std::vector<std::int64_t>& numbers, const ProcessGroup& group) {
  if (group.world_size() == 1 || numbers.empty()) return numbers;
  const at::Tensor message = at::tensor(numbers, at::kLong).to(group.device());
  group.broadcast(message);
  const at::Tensor agreed = message.cpu();
  group.check();
  const auto* begin = agreed.const_data_ptr<std::int64_t>();
  return {begin, begin + agreed.numel()};
}

}  // namespace

ParameterAgreement::ParameterAgreement(const std::vector<NamedParameter>& trained, std::vector<NamedParameter> frozen,
                                       ProcessGroup group)
    : trained_(trained), frozen_(std::move(frozen)), group_(std::move(group)) {
  for (const auto& [name, tensor, sparse] : trained)
    agreed_.push_back({tensor.scalar_type(), tensor.device(), tensor.sizes().vec()});
}

void ParameterAgreement::fail(const std::string& text) const {
  group_.abort(text);
  throw ModelMismatch(text, {.rank = group_.rank(), .call = "forward"});
}

void ParameterAgreement::check() const {
  for (std::size_t i = 0; i < trained_.size(); ++i) {
    const at::Tensor& tensor = trained_[i].tensor;
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
                    trained_[i].name, kind(tensor.sizes(), tensor.scalar_type(), tensor.device()), group_.rank(),
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

Strides agree_on_strides(const std::vector<NamedParameter>& parameters, const ProcessGroup& group) {
  std::vector<std::int64_t> numbers;
  for (const auto& [name, tensor, sparse] : parameters) {
    // AccumulateGrad prefers the same ones.
    const bool dense = tensor.is_non_overlapping_and_dense();
    const at::DimVector strides = dense ? at::DimVector(tensor.strides()) : c10::contiguous_strides(tensor.sizes());
    numbers.insert(numbers.end(), strides.begin(), strides.end());
  }
  numbers = numbers_of_rank_0(numbers, group);
  Strides strides;
  auto next = numbers.begin();
  for (const auto& [name, tensor, sparse] : parameters) {
    strides.emplace_back(next, next + tensor.dim());
    next += tensor.dim();
  }
  return strides;
}

std::vector<std::size_t> agree_on_order(const std::vector<std::size_t>& arrivals, std::size_t count,
                                        const ProcessGroup& group) {
  std::vector<std::int64_t> numbers;
  std::vector<bool> seen(count, false);
  for (const std::size_t index : arrivals) {
    numbers.push_back(static_cast<std::int64_t>(index));
    seen[index] = true;
  }
  for (std::size_t i = count; i-- > 0;) {
    if (!seen[i]) numbers.push_back(static_cast<std::int64_t>(i));
  }
  std::vector<std::size_t> order;
  seen.assign(count, false);
  for (const std::int64_t number : numbers_of_rank_0(numbers, group)) {
    const auto index = static_cast<std::size_t>(number);
    // On a device a broadcast that failed is found out only later.
    if (index >= count || seen[index])
      throw Error("the ranks could not agree on an order of buckets: a broadcast has failed",
                  {.rank = group.rank(), .call = "backward"});
    seen[index] = true;
    order.push_back(index);
  }
  return order;
}

}  // namespace ddpkit
