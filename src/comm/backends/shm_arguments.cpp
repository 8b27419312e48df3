#include "comm/backends/shm_arguments.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

#include "tensor/tensor_memory.h"

namespace ddpkit {

shm::DataType data_type(const at::Tensor& tensor) {
  if (const auto dtype = dtype_of(tensor.scalar_type())) return *dtype;
  throw InvalidArgument(
      fmt::format("the shm backend has no collectives for tensors of type {}", c10::toString(tensor.scalar_type())));
}

std::size_t element_count(const at::Tensor& tensor) {
  return static_cast<std::size_t>(tensor.numel()) * (tensor.is_complex() ? 2 : 1);
}

void check_tensor(const at::Tensor& tensor, const char* call) {
  if (!tensor.defined()) throw InvalidArgument(fmt::format("{}: the tensor is undefined", call));
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided)
    throw InvalidArgument(fmt::format("{}: the shm backend takes dense CPU tensors, not {} on {}", call,
                                      c10::str(tensor.layout()), tensor.device().str()));
  if (tensor.is_conj() || tensor.is_neg())
    throw InvalidArgument(fmt::format("{}: the tensor is a {} view; call {}() first", call,
                                      tensor.is_conj() ? "conjugate" : "negative",
                                      tensor.is_conj() ? "resolve_conj" : "resolve_neg"));
}

void check_writable(const at::Tensor& tensor, const char* call) {
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
    throw InvalidArgument(
        fmt::format("{}: the result cannot be put into a tensor of sizes [{}] and strides [{}], whose elements share "
                    "memory: give its contiguous() copy",
                    call, fmt::join(tensor.sizes(), ", "), fmt::join(tensor.strides(), ", ")));
}

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* call) {
  if (tensors.size() != 1) throw InvalidArgument(fmt::format("{}: one tensor per call, not {}", call, tensors.size()));
  check_tensor(tensors[0], call);
  return tensors[0];
}

void check_list(const std::vector<at::Tensor>& tensors, int world_size, const at::Tensor& like, const char* call) {
  if (tensors.size() != static_cast<std::size_t>(world_size))
    throw InvalidArgument(
        fmt::format("{}: the list needs a tensor for each of {} ranks, not {}", call, world_size, tensors.size()));
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor, call);
    if (tensor.numel() != like.numel() || tensor.scalar_type() != like.scalar_type())
      throw InvalidArgument(fmt::format("{}: the list holds {} elements of {}, but {} of {} are needed", call,
                                        tensor.numel(), c10::toString(tensor.scalar_type()), like.numel(),
                                        c10::toString(like.scalar_type())));
  }
}

void check_root(std::int64_t root, int world_size, const char* call) {
  if (root < 0 || root >= world_size)
    throw InvalidArgument(fmt::format("{}: there is no rank {} among {}", call, root, world_size));
}

shm::Reduction reduction(const c10d::ReduceOp& op, const at::Tensor& tensor, const char* call) {
  if (op.op_ == c10d::ReduceOp::UNUSED) throw InvalidArgument(fmt::format("{}: no reduction operator", call));
  const bool premultiplied = op.op_ == c10d::ReduceOp::PREMUL_SUM;
  const auto wanted = premultiplied ? shm::Reduction::kSum : static_cast<shm::Reduction>(op.op_);
  const bool linear = wanted == shm::Reduction::kSum || wanted == shm::Reduction::kAvg;
  if ((tensor.is_complex() && !linear) || !kernels::supports(data_type(tensor), wanted))
    throw InvalidArgument(
        fmt::format("{}: this reduction is not defined for {}", call, c10::toString(tensor.scalar_type())));
  return wanted;
}

at::Tensor contribution(const c10d::ReduceOp& op, const at::Tensor& tensor) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return tensor.contiguous();
  const auto* factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (!factor) throw InvalidArgument("a PREMUL_SUM needs its factor");
  const at::NoGradGuard no_grad;
  const at::Tensor product =
      factor->tensor_factor.defined() ? tensor * factor->tensor_factor : tensor * factor->double_factor;
  return product.to(tensor.scalar_type()).contiguous();
}

const void* Operands::input(at::Tensor dense) { return kept_->tensors.emplace_back(std::move(dense)).data_ptr(); }

void* Operands::output(const at::Tensor& tensor) {
  check_writable(tensor, call_);
  if (tensor.is_contiguous()) return kept_->tensors.emplace_back(tensor).data_ptr();
  return kept_->copies.emplace_back(tensor, at::empty(tensor.sizes(), tensor.options().requires_grad(false)))
      .second.data_ptr();
}

void Operands::Kept::copy_back() const {
  const at::NoGradGuard no_grad;
  for (auto [tensor, dense] : copies) tensor.copy_(dense);
}

}  // namespace ddpkit
