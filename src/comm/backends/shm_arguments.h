// Tier 2: c10d's Types.hpp. Checks and conversions of tensors for the shm backend.
#pragma once

#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <memory>
#include <utility>
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

/// The tensors of one call, as dense memory for the engine. One allocation.
class Operands {
 public:
  /// `call`: the name for messages.
  explicit Operands(const char* call) : call_(call) {}
  /// Keeps an input until the end of the call. Returns its memory.
  const void* input(at::Tensor dense);
  /// Returns dense memory for the result of `tensor`: its own, or that of a temporary, which is copied back at the end.
  /// Throws InvalidArgument if `tensor` cannot hold a result.
  void* output(const at::Tensor& tensor);
  /// Makes the request, or the message, copy the results back and keep the tensors until then.
  template <class Call>
  void attach_to(Call& call) {
    if (!kept_->copies.empty()) call.on_finish = [kept = kept_.get()] { kept->copy_back(); };
    call.keep_alive = std::move(kept_);
  }

 private:
  struct Kept {
    void copy_back() const;
    c10::SmallVector<at::Tensor, 2> tensors;
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;  ///< The caller's tensor, and its temporary.
  };
  const char* call_;
  std::shared_ptr<Kept> kept_ = std::make_shared<Kept>();
};

}  // namespace ddpkit
