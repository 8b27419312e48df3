#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>

#include "virtual_gpu/aten/aten.h"

namespace vgpu::aten {
namespace {

using Tensor = at::Tensor;

Task copy_task(const Tensor& to, const Tensor& from) {
  return [to, from] {
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  };
}

/// As in LibTorch: the copy runs on the source's stream, which waits for the target's stream. Then the target's stream
/// waits for the copy.
void copy_between_devices(const Tensor& to, const Tensor& from) {
  const auto source = c10::cuda::getCurrentCUDAStream(from.device().index());
  const auto target = c10::cuda::getCurrentCUDAStream(to.device().index());
  const bool other_device = to.device() != from.device();
  if (other_device) {
    c10::Event ready(c10::kCUDA);
    ready.record(target.unwrap());
    ready.block(source.unwrap());
  }
  {
    const c10::DeviceGuard guard(from.device());  // All default streams have the handle 0.
    check_order(source.stream(), "aten::copy_", {access_to(from, false), access_to(to, true)});
    enqueue(source.stream(), copy_task(on_cpu(to), on_cpu(from)));
  }
  if (other_device) {
    c10::Event copied(c10::kCUDA);
    copied.record(source.unwrap());
    copied.block(target.unwrap());
  }
}

}  // namespace

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  const at::NoGradGuard no_grad;
  if (self.is_cuda() && source.is_cuda()) {
    copy_between_devices(self, source);
    return self;
  }
  const Tensor& host = self.is_cuda() ? source : self;
  const bool is_async = non_blocking && host.is_pinned();
  const c10::DeviceGuard guard((self.is_cuda() ? self : source).device());
  void* stream = current_stream();
  if (!is_async) c10::cuda::warn_or_error_on_sync();
  C10_CUDA_CHECK(cudaGetLastError());
  check_order(stream, "aten::copy_", {access_to(source, false), access_to(self, true)});
  // Pageable memory is staged. LibTorch's allocator keeps pinned memory until an event; here the task holds it.
  const Tensor from = self.is_cuda() && !is_async ? source.clone() : on_cpu(source);
  enqueue(stream, [host, task = copy_task(on_cpu(self), from)] { task(); });
  if (!is_async) synchronize(stream);
  return self;
}

/// 0 is the plain implementation.
std::int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                        std::optional<double>, bool) {
  return 0;
}

LstmCell lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                   const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  Tensor gates = input_gates + hidden_gates;
  if (input_bias && input_bias->defined()) gates = gates + *input_bias + *hidden_bias;
  const auto chunks = gates.chunk(4, 1);
  const Tensor in = chunks[0].sigmoid(), forget = chunks[1].sigmoid(), cell = chunks[2].tanh();
  const Tensor out = chunks[3].sigmoid();
  const Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

LstmCell lstm_cell_backward(const std::optional<Tensor>& grad_hy, const std::optional<Tensor>& grad_cy,
                            const Tensor& cx, const Tensor& cy, const Tensor& workspace, bool has_bias) {
  const auto chunks = workspace.chunk(4, 1);
  const Tensor &in = chunks[0], &forget = chunks[1], &cell = chunks[2], &out = chunks[3];
  const Tensor tanh = cy.tanh();
  const Tensor hidden = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
  Tensor state = hidden * out * (1 - tanh * tanh);
  if (grad_cy && grad_cy->defined()) state = state + *grad_cy;
  const Tensor gates = at::cat({state * cell * in * (1 - in), state * cx * forget * (1 - forget),
                                state * in * (1 - cell * cell), hidden * tanh * out * (1 - out)},
                               1);
  return {gates, state * forget, has_bias ? gates.sum(0) : Tensor()};
}

}  // namespace vgpu::aten
