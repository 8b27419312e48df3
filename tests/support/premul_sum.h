// Tier 2: c10d's types.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace ddpkit::testing {

/// Returns c10d's sum of the inputs times `factor`: a number, or a tensor. c10d's own function has another name from
/// LibTorch 2.15 on.
template <class Factor>
c10d::ReduceOp premul_sum(const Factor& factor) {
  c10d::ReduceOp op;
  op.op_ = c10d::ReduceOp::PREMUL_SUM;
  op.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(factor);
  return op;
}

}  // namespace ddpkit::testing
