// Tier 1: c10/core/Device.h and ScalarType.h.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <vector>

namespace ddpkit {

/// What the bucket plan needs to know of a parameter.
struct ParameterInfo {
  std::size_t numel = 0;  ///< Elements.
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::Device device = c10::kCPU;

  std::size_t bytes() const { return numel * c10::elementSize(dtype); }
};

/// Groups parameters into buckets that are reduced together. Parameters are taken from last to first, since backward
/// makes their gradients about in that order; a bucket holds one dtype and device, and is closed when it reaches its
/// cap (the first of each dtype and device `first_bucket_bytes`, so that communication starts early; the rest
/// `bucket_bytes`). The parameter that reaches the cap is the bucket's last, as in c10d. Buckets are ordered by when
/// they are complete: by the last gradient that each waits for.
///
/// A pure function: the same on every rank for the same model. Returns parameter indices. [bucket][position]
std::vector<std::vector<std::size_t>> plan_buckets(const std::vector<ParameterInfo>& parameters,
                                                   std::size_t first_bucket_bytes, std::size_t bucket_bytes);

}  // namespace ddpkit
