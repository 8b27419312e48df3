// Tier 2: torch/nn/module.h. Checks that the models of all ranks agree.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/bucket_plan.h>

namespace ddpkit {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// The first line in which the text of a rank differs from rank 0's.
struct RankDifference {
  int rank = 0;
  std::string reference, other;  ///< "nothing more" after the last line.
};
/// `texts`: the lines of each rank. [rank]
std::optional<RankDifference> first_difference(const std::vector<std::string>& texts);

/// Collective. Calls `body` on all ranks. If `body` throws, all ranks throw the error of the lowest rank that failed.
/// This rank throws the same exception, the others an InvalidArgument or Error with its text. These errors name the
/// rank and `call`.
void run_on_all_ranks(const ProcessGroup& group, const char* call, const std::function<void()>& body);
/// Like run_on_all_ranks(). Returns the texts of all ranks. [rank]
std::vector<std::string> texts_of_all_ranks(const ProcessGroup& group, const char* call,
                                            const std::function<std::string()>& body);
/// Like run_on_all_ranks(). Also throws InvalidArgument with the first different line if the texts of the ranks differ.
void check_same_on_all_ranks(const ProcessGroup& group, const char* call, const std::function<std::string()>& body);

/// Returns the weights of embeddings with sparse(true).
std::unordered_set<const void*> sparse_weights(const torch::nn::Module& module);

/// Returns one line per parameter and buffer.
std::vector<std::string> describe_model(const torch::nn::Module& module, const NamedTensors& parameters,
                                        const NamedTensors& buffers);

/// Returns one line per tensor, with a checksum of its values. `kind`: "parameter" or "buffer".
std::vector<std::string> describe_values(const char* kind, const NamedTensors& tensors);

/// Collective: run_on_all_ranks(). Also throws ModelMismatch with the first line that differs between ranks. `what`:
/// the sentence before the difference.
void check_same_model(const ProcessGroup& group, const char* call, const char* what,
                      const std::function<std::vector<std::string>()>& lines);

/// Throws ModelMismatch for a parameter with requires_grad that is not in `wrapped`, and notifies the other ranks.
void check_all_wrapped(const NamedTensors& parameters, const std::vector<at::Tensor>& wrapped,
                       const ProcessGroup& group);

/// Call in a catch block. Rethrows the exception, and mentions join() if ranks may have different numbers of batches.
[[noreturn]] void rethrow_with_advice();

/// The model properties that all ranks agreed on at wrapping. Detects later changes on this rank.
class ParameterAgreement {
 public:
  /// `trained` must outlive this object. `frozen`: parameters that do not require a gradient.
  ParameterAgreement(const std::vector<NamedParameter>& trained, std::vector<NamedParameter> frozen,
                     ProcessGroup group);

  /// Not collective. Throws ModelMismatch and aborts the group if a parameter has changed since.
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

/// Collective. Returns rank 0's strides of each gradient: the order of its elements in messages.
Strides agree_on_strides(const std::vector<NamedParameter>& parameters, const ProcessGroup& group);

/// Collective. Returns rank 0's arrival order of the gradients of `count` parameters. `arrivals`: parameters in the
/// order in which their gradients arrived on this rank. Parameters without a gradient follow, in reverse order.
std::vector<std::size_t> agree_on_order(const std::vector<std::size_t>& arrivals, std::size_t count,
                                        const ProcessGroup& group);

}  // namespace ddpkit
