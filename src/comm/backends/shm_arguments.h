// Tier 2: c10d's Types.hpp. What the shm backend makes of a caller's tensors.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <vector>

#include "comm/shm/engine.h"

namespace ddpkit {

/// Throws InvalidArgument for types that the engine does not know.
shm::DataType data_type(const at::Tensor& tensor);

/// Elements of data_type(): a complex number counts as two.
std::size_t element_count(const at::Tensor& tensor);

/// Throws InvalidArgument unless the tensor is dense, on the CPU, and means what stands in its memory. `call` goes into
/// the message.
void check_tensor(const at::Tensor& tensor, const char* call);

/// Throws InvalidArgument where elements of the tensor share memory, as expand() has it: a result cannot be put there.
void check_writable(const at::Tensor& tensor, const char* call);

/// The list's one tensor, checked.
const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* call);

/// Checks that there is one tensor a rank, each with `like`'s type and number of elements.
void check_list(const std::vector<at::Tensor>& tensors, int world_size, const at::Tensor& like, const char* call);

void check_root(std::int64_t root, int world_size, const char* call);

/// The engine's name for c10d's reduction. Throws InvalidArgument where the tensor's type has none.
shm::Reduction reduction(const c10d::ReduceOp& op, const at::Tensor& tensor, const char* call);

/// What this rank puts into a reduction: the tensor itself, dense; for PREMUL_SUM times the factor.
at::Tensor contribution(const c10d::ReduceOp& op, const at::Tensor& tensor);

/// Tensors as the engine wants them: dense stand-ins where the caller's are not, which are copied back at the end.
class Outputs {
 public:
  /// `call` goes into messages.
  explicit Outputs(const char* call) : call_(call) {}
  /// Dense memory for the result that belongs into `tensor`. Throws InvalidArgument where it cannot be put there.
  at::Tensor add(const at::Tensor& tensor);
  /// Puts the results into the caller's tensors, and keeps all alive until then.
  void attach_to(shm::Request& request, std::vector<at::Tensor> inputs);
  void attach_to(shm::Message& message);

 private:
  const char* call_;
  std::vector<at::Tensor> targets_;
  std::vector<at::Tensor> dense_;
};

}  // namespace ddpkit
