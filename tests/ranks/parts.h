// The ranks' inputs of a collective: small whole numbers, whose sums are exact in every type.
#pragma once

#include <torch/torch.h>

namespace ddpkit::testing {

/// Returns rank `rank`'s input: reproducible, and different on every rank.
inline torch::Tensor part(int rank, at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  torch::manual_seed(static_cast<std::uint64_t>(2000 + rank));
  return torch::randint(0, 100, sizes, at::kLong).to(dtype);
}

}  // namespace ddpkit::testing
