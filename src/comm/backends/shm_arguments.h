// Tier 2: c10d's Types.hpp. Checks and conversions of tensors for the shm backend.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <vector>

#include "comm/shm/engine.h"

namespace ddpkit {

/// Throws InvalidArgument for types that the engine does not support.
shm::DataType data_type(const at::Tensor& tensor);

/// Returns the number of elements of data_type(): a complex number counts as two.
std::size_t element_count(const at::Tensor& tensor);

/// Throws InvalidArgument unless the tensor is dense, on the CPU, and not a conjugate or negative view. The message
/// contains `call`.
void check_tensor(const at::Tensor& tensor, const char* call);

/// Throws InvalidArgument if elements of the tensor share memory, for example after expand(), so it cannot hold a
/// result.
void check_writable(const at::Tensor& tensor, const char* call);

/// Returns the only tensor of the list. Throws InvalidArgument for another number of tensors.
const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* call);

/// Checks that there is one tensor per rank, each with `like`'s type and number of elements.
void check_list(const std::vector<at::Tensor>& tensors, int world_size, const at::Tensor& like, const char* call);

void check_root(std::int64_t root, int world_size, const char* call);

/// Converts c10d's reduction to the engine's. Throws InvalidArgument if the tensor's type does not support it.
shm::Reduction reduction(const c10d::ReduceOp& op, const at::Tensor& tensor, const char* call);

/// Returns this rank's input of a reduction: the contiguous tensor; for PREMUL_SUM times the factor.
at::Tensor contribution(const c10d::ReduceOp& op, const at::Tensor& tensor);

/// Dense tensors for the engine. Other tensors get a dense temporary, which is copied back at the end.
class Outputs {
 public:
  /// `call`: the name for messages.
  explicit Outputs(const char* call) : call_(call) {}
  /// Returns dense memory for the result of `tensor`. Throws InvalidArgument if `tensor` cannot hold a result.
  at::Tensor add(const at::Tensor& tensor);
  /// Makes the request copy the results to the caller's tensors, and keep all tensors alive until then.
  void attach_to(shm::Request& request, std::vector<at::Tensor> inputs);
  void attach_to(shm::Message& message);

 private:
  const char* call_;
  std::vector<at::Tensor> targets_;
  std::vector<at::Tensor> dense_;
};

}  // namespace ddpkit
