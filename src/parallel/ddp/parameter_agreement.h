// Tier 1. What the ranks agree on about the parameters of a reducer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/reducer.h>

namespace ddpkit {

/// What all ranks had when the model was wrapped, and whether this rank still has it.
class ParameterAgreement {
 public:
  /// `trained` must outlive this object. `frozen`: parameters that want no gradient.
  ParameterAgreement(const std::vector<NamedParameter>& trained, std::vector<NamedParameter> frozen,
                     ProcessGroup group);

  /// Not collective. Throws ModelMismatch, and aborts the group, for a parameter that has been changed since.
  void check() const;

 private:
  struct Agreed {
    at::ScalarType dtype;
    at::Device device;
    std::vector<std::int64_t> sizes;
  };
  [[noreturn]] void fail(const std::string& text) const;

  const std::vector<NamedParameter>& trained_;
  std::vector<NamedParameter> frozen_;
  ProcessGroup group_;
  std::vector<Agreed> agreed_;  ///< [param]
};

using Strides = std::vector<std::vector<std::int64_t>>;  ///< [param][dimension]

/// Collective. The order of each gradient's elements in messages: rank 0's.
Strides agree_on_strides(const std::vector<NamedParameter>& parameters, const ProcessGroup& group);

/// Collective. The order in which the gradients of `count` parameters come: rank 0's. `arrivals`: parameters in the
/// order in which their gradients came on this rank. Parameters without a gradient follow, the last one first.
std::vector<std::size_t> agree_on_order(const std::vector<std::size_t>& arrivals, std::size_t count,
                                        const ProcessGroup& group);

}  // namespace ddpkit
