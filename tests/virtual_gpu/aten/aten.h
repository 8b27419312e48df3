// Shared code of the sources of libvgpu_aten.so.
#pragma once

#include <functional>
#include <string>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/cuda/CUDAStream.h>

#include "virtual_gpu/vgpu.h"

namespace vgpu::aten {

/// Returns the tensor's memory as a CPU tensor. Like a kernel, it does not keep the memory alive.
at::Tensor on_cpu(const at::Tensor& tensor);

/// From now on, the stream that allocates memory writes to it. The memory may be in use on another stream. LibTorch's
/// allocator must exist.
void poison_allocations();

/// Returns the current stream of the current device.
void* current_stream();

/// Returns the memory from the first to the last element of a CUDA tensor; nothing for other tensors.
Access access_to(const at::Tensor& tensor, bool writes);

/// The operator `what` copies `from`, a CPU tensor, to `to` on the current stream.
void publish(const std::string& what, const at::Tensor& to, at::Tensor from);

/// Returns a new CUDA tensor that receives the values of `cpu` on the current stream, from the operator `what`.
at::Tensor to_device(const std::string& what, const at::Tensor& cpu, c10::Device device);

/// Calls `visit` with each tensor of an argument or result.
void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit);

/// The boxed kernel of all CUDA operators.
void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack);

// Operators without a CPU kernel, or with a kernel other than the CPU's.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking);
std::int64_t sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                        double, bool, std::optional<double>, bool);
using LstmCell = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
LstmCell lstm_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cx,
                   const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias);
LstmCell lstm_cell_backward(const std::optional<at::Tensor>& grad_hy, const std::optional<at::Tensor>& grad_cy,
                            const at::Tensor& cx, const at::Tensor& cy, const at::Tensor& workspace, bool has_bias);

}  // namespace vgpu::aten
