#include "virtual_gpu/aten/aten.h"

namespace vgpu::aten {

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda() || tensor.is_sparse()) return tensor;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  at::Tensor alias = tensor.numel() == 0
                         ? at::empty_strided(tensor.sizes(), tensor.strides(), options)
                         : at::from_blob(host_address(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  return alias;
}

void* current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

Access access_to(const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || !tensor.is_cuda() || tensor.is_sparse() || tensor.numel() == 0) return {nullptr, 0, writes};
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {tensor.const_data_ptr(), static_cast<std::size_t>(last + 1) * tensor.element_size(), writes};
}

void publish(const std::string& what, const at::Tensor& to, at::Tensor from) {
  if (to.numel() == 0) return;
  check_order(current_stream(), what, {access_to(to, true)});
  enqueue(current_stream(), [alias = on_cpu(to), from = std::move(from)] {
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below;
    alias.copy_(from);
  });
}

at::Tensor to_device(const std::string& what, const at::Tensor& cpu, c10::Device device) {
  if (!cpu.defined()) return cpu;
  const c10::DeviceGuard guard(device);
  at::Tensor result = at::empty_strided(cpu.sizes(), cpu.strides(), cpu.options().device(device).pinned_memory(false));
  if (!is_capturing(current_stream())) {
    publish(what, result, cpu);
  } else if (result.numel() > 0) {
    // A capture runs no task. Writes the values now, for operators that read them during the capture.
    on_cpu(result).copy_(cpu);
  }
  return result;
}

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      if (tensor) visit(*tensor);
  }
}

}  // namespace vgpu::aten
