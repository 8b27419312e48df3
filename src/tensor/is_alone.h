// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

namespace ddpkit {

/// Whether nobody else holds the gradient's memory. Autograd hands a gradient on without a copy: what it is a view of
/// may be another parameter's gradient too, or still be read on the way to one. May say no where the answer is yes.
/// `added`: what autograd has just handed to the accumulator, when called from its hook.
inline bool is_alone(const at::Tensor& gradient, const at::Tensor& added) {
  std::size_t known = 1;
  if (added.defined() && added.has_storage() && added.is_alias_of(gradient)) {
    ++known;  // It has become the gradient, and backward lets go of it after this hook.
    // A view keeps the tensor that it is of, which here is mostly a product that was transposed.
    if (added.is_view() && added._base().use_count() == 1) ++known;
  }
  return gradient.storage().use_count() == known;
}

}  // namespace ddpkit
