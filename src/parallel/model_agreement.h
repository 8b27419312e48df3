// Tier 2: torch/nn/module.h. What the models of all ranks must have in common.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ddpkit/comm/process_group.h>

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

}  // namespace ddpkit
