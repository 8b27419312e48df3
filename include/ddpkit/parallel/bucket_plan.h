// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <vector>

namespace ddpkit {

/// A parameter and its name in the module.
struct NamedParameter {
  std::string name;     ///< Such as "features.0.weight".
  at::Tensor tensor;    ///< The parameter itself.
  bool sparse = false;  ///< Its gradient is a sparse tensor.
};

/// The properties of a parameter that the bucket plan needs.
struct ParameterInfo {
  std::size_t numel = 0;                           ///< Elements.
  c10::ScalarType dtype = c10::ScalarType::Float;  ///< Type of the gradient.
  c10::Device device = c10::kCPU;                  ///< Device of the gradient.

  std::size_t bytes() const { return numel * c10::elementSize(dtype); }  ///< Size of the gradient.
};

using BucketPlan = std::vector<std::vector<std::size_t>>;  ///< Indices of parameters. [bucket][position]

/// Groups parameters into buckets that are reduced together. Takes parameters from last to first, because backward
/// computes gradients in about that order. A bucket has one dtype and one device. It is closed when it reaches its cap.
/// The cap is `first_bucket_bytes` for the first bucket of each dtype and device, so that communication starts early,
/// and `bucket_bytes` for the others. The parameter that reaches the cap is in the bucket, as in c10d. Buckets are
/// ordered by the time of their last gradient.
///
/// Pure function: returns the same on every rank for the same model.
BucketPlan plan_buckets(const std::vector<ParameterInfo>& parameters, std::size_t first_bucket_bytes,
                        std::size_t bucket_bytes);

}  // namespace ddpkit
