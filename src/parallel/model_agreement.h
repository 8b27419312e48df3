// Tier 2: torch/nn/module.h. What the models of all ranks must have in common.
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
#include <ddpkit/parallel/reducer.h>

namespace ddpkit {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// The first line in which the text of a rank differs from that of rank 0.
struct RankDifference {
  int rank = 0;
  std::string reference, other;  ///< "nothing more" after the last line.
};
/// `texts`: of all ranks, in lines. [rank]
std::optional<RankDifference> first_difference(const std::vector<std::string>& texts);

/// Collective. Calls `body` on all ranks. If `body` throws, all ranks throw the error of the lowest rank that failed:
/// that rank the same exception, the others an InvalidArgument or Error with its text. The Errors and InvalidArguments
/// name the rank and `call`.
void run_on_all_ranks(const ProcessGroup& group, const char* call, const std::function<void()>& body);
/// The same. Returns the texts of all ranks. [rank]
std::vector<std::string> texts_of_all_ranks(const ProcessGroup& group, const char* call,
                                            const std::function<std::string()>& body);
/// The same. Also throws InvalidArgument, with the first line that differs, if the texts of the ranks differ.
void check_same_on_all_ranks(const ProcessGroup& group, const char* call, const std::function<std::string()>& body);

/// Weights of embeddings made with sparse(true).
std::unordered_set<const void*> sparse_weights(const torch::nn::Module& module);

/// One line per parameter and buffer.
std::vector<std::string> describe_model(const torch::nn::Module& module, const NamedTensors& parameters,
                                        const NamedTensors& buffers);

/// One line per tensor, with a checksum of its values. `kind`: "parameter" or "buffer".
std::vector<std::string> describe_values(const char* kind, const NamedTensors& tensors);

/// Collective: run_on_all_ranks(). Also throws ModelMismatch with the first line that differs between ranks. `what`:
/// the sentence before the difference.
void check_same_model(const ProcessGroup& group, const char* call, const char* what,
                      const std::function<std::vector<std::string>()>& lines);

/// Throws ModelMismatch for a parameter with requires_grad that is none of `wrapped`, and tells the other ranks.
void check_all_wrapped(const NamedTensors& parameters, const std::vector<at::Tensor>& wrapped,
                       const ProcessGroup& group);

/// In a catch block: throws the exception again, and mentions join() if ranks may have different numbers of batches.
[[noreturn]] void rethrow_with_advice();

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
