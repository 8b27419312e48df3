// One boxed kernel for all CUDA operators. It waits for the current stream, runs the CPU kernel on the inputs in place,
// and writes the results on the current stream. An operator that does not wait for another stream reads old values.
#include <iostream>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>

#include "virtual_gpu/aten/aten.h"

namespace vgpu::aten {
namespace {

using c10::IValue;
using torch::jit::Stack;

/// An argument that the operator writes: its tensors on the device, and copies on the CPU.
struct Written {
  std::size_t argument;
  bool is_list;
  std::vector<at::Tensor> device, cpu;
};

struct Arguments {
  Stack cpu;
  std::vector<Written> written;
};

/// Returns the device of the first CUDA tensor; else of an argument `device`; else the current device.
c10::Device device_of(const Stack& arguments) {
  std::optional<c10::Device> device;
  for (const IValue& value : arguments) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.is_cuda() && !device) device = tensor.device();
    });
    if (value.isDevice() && value.toDevice().is_cuda() && !device) device = value.toDevice();
  }
  if (device && device->has_index()) return *device;
  return {c10::kCUDA, c10::cuda::current_device()};
}

at::Tensor copy_of(const at::Tensor& cpu) {
  at::Tensor copy = at::empty_strided(cpu.sizes(), cpu.strides(), cpu.options());
  if (cpu.is_conj()) copy._set_conj(true);
  copy.copy_(cpu);
  return copy;
}

IValue tensor_on_cpu(const at::Tensor& tensor, bool is_written, std::size_t index, Arguments& arguments) {
  at::Tensor cpu = on_cpu(tensor);
  if (!is_written || !tensor.defined() || !tensor.is_cuda()) return cpu;
  cpu = copy_of(cpu);
  arguments.written.push_back({index, false, {tensor}, {cpu}});
  return cpu;
}

IValue list_on_cpu(const std::vector<at::Tensor>& tensors, bool is_written, std::size_t index, Arguments& arguments) {
  c10::List<at::Tensor> list;
  Written written{index, true, {}, {}};
  for (const at::Tensor& tensor : tensors) {
    at::Tensor cpu = on_cpu(tensor);
    if (is_written) {
      cpu = cpu.clone();
      written.device.push_back(tensor);
      written.cpu.push_back(cpu);
    }
    list.push_back(cpu);
  }
  if (is_written) arguments.written.push_back(std::move(written));
  return list;
}

IValue value_on_cpu(const IValue& value, bool is_written, std::size_t index, Arguments& arguments) {
  if (value.isTensor()) return tensor_on_cpu(value.toTensor(), is_written, index, arguments);
  if (value.isTensorList()) return list_on_cpu(value.toTensorVector(), is_written, index, arguments);
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      list.push_back(tensor ? std::optional(on_cpu(*tensor)) : tensor);
    return list;
  }
  if (value.isDevice()) return c10::Device(c10::kCPU);
  if (value.isGenerator() && value.toGenerator().device().is_cuda()) return std::optional<at::Generator>();
  return value;
}

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

Arguments arguments_on_cpu(const c10::FunctionSchema& schema, const Stack& stack) {
  Arguments arguments;
  for (std::size_t i = 0; i < stack.size(); ++i)
    arguments.cpu.push_back(value_on_cpu(stack[i], is_written(schema.arguments()[i]), i, arguments));
  return arguments;
}

/// Refuses arguments that the CPU's kernel takes and CUDA's kernel does not.
void check_for_cuda(const c10::FunctionSchema& schema, const Stack& stack) {
  if (schema.name() != "aten::native_batch_norm_backward") return;
  for (std::size_t i = 0; i < stack.size(); ++i) {
    const std::string& name = schema.arguments()[i].name();
    TORCH_CHECK(
        (name != "save_mean" && name != "save_invstd") || (stack[i].isTensor() && stack[i].toTensor().defined()),
        "virtual GPU: ", schema.name(), ": CUDA's kernel needs ", name);
  }
}

void call(const c10::OperatorHandle& op, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

/// An operator that returns an argument returns the argument itself.
IValue written_result(const c10::FunctionSchema& schema, const c10::AliasInfo& alias, const Arguments& arguments,
                      const Stack& stack) {
  for (const Written& written : arguments.written)
    if (*schema.arguments()[written.argument].alias_info() == alias) return stack[written.argument];
  TORCH_CHECK(false, "virtual GPU: no argument for a result of ", schema.name());
}

IValue result_on_device(const std::string& what, const IValue& value, c10::Device device) {
  if (value.isTensor()) return to_device(what, value.toTensor(), device);
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(to_device(what, tensor, device));
  return list;
}

Stack results_on_device(const c10::FunctionSchema& schema, const Stack& cpu, const Arguments& arguments,
                        const Stack& stack, c10::Device device) {
  Stack results;
  for (std::size_t i = 0; i < schema.returns().size(); ++i) {
    const c10::Argument& result = schema.returns()[i];
    results.push_back(is_written(result) ? written_result(schema, *result.alias_info(), arguments, stack)
                                         : result_on_device(schema.name(), cpu[i], device));
  }
  return results;
}

void publish_written(const std::string& what, const Arguments& arguments) {
  for (const Written& written : arguments.written) {
    for (std::size_t i = 0; i < written.device.size(); ++i) {
      if (written.device[i].sizes() != written.cpu[i].sizes()) written.device[i].resize_(written.cpu[i].sizes());
      publish(what, written.device[i], written.cpu[i]);
    }
  }
}

std::vector<at::Tensor> all_on_cpu(const Stack& values) {
  std::vector<at::Tensor> tensors;
  for (const IValue& value : values)
    for_each_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(on_cpu(tensor)); });
  return tensors;
}

std::vector<Access> accesses_to(const Stack& values, bool writes) {
  std::vector<Access> accesses;
  for (const IValue& value : values)
    for_each_tensor(value, [&](const at::Tensor& tensor) { accesses.push_back(access_to(tensor, writes)); });
  return accesses;
}

/// Adds a node to the graph under capture: the same operator on the same memory.
void capture(const c10::OperatorHandle& op, const Arguments& arguments, Stack replayed, const Stack& results) {
  for (const Written& written : arguments.written) {
    c10::List<at::Tensor> targets;
    for (const at::Tensor& tensor : written.device) targets.push_back(on_cpu(tensor));
    replayed[written.argument] = written.is_list ? IValue(targets) : IValue(targets.get(0));
  }
  enqueue(current_stream(), [op, replayed, outputs = all_on_cpu(results)] {
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below;
    Stack stack = replayed;
    call(op, stack);
    const std::vector<at::Tensor> values = all_on_cpu(stack);
    for (std::size_t i = 0; i < values.size(); ++i)
      if (values[i].defined() && outputs[i].numel() > 0 && outputs[i].data_ptr() != values[i].data_ptr())
        outputs[i].copy_(values[i]);
  });
}

/// An operator that returns a value, such as at::equal(), makes the host wait.
bool returns_value(const c10::FunctionSchema& schema) {
  for (const c10::Argument& result : schema.returns()) {
    const auto kind = result.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return true;
  }
  return false;
}

void trace(const c10::FunctionSchema& schema) {
  static const bool is_on = setting("VGPU_TRACE", 0) != 0;
  if (is_on) std::cerr << "virtual GPU: " << schema.name() << '.' << schema.overload_name() << '\n';
}

}  // namespace

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const Stack own(stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size()), stack->end());
  const c10::Device device = device_of(own);
  const c10::DeviceGuard guard(device);
  C10_CUDA_CHECK(cudaGetLastError());
  poison_allocations();
  wait_for(current_stream());
  trace(schema);
  check_for_cuda(schema, own);
  const Arguments arguments = arguments_on_cpu(schema, own);
  Stack outputs = arguments.cpu;
  check_order(current_stream(), schema.name(), accesses_to(own, false));
  if (returns_value(schema)) {
    c10::cuda::warn_or_error_on_sync();
    synchronize(current_stream());
  }
  call(op, outputs);
  const bool captured = is_capturing(current_stream());
  if (!captured) publish_written(schema.name(), arguments);
  const Stack results = results_on_device(schema, outputs, arguments, own, device);
  if (captured) {
    check_order(current_stream(), schema.name(), accesses_to(results, true));
    capture(op, arguments, arguments.cpu, results);
  }
  stack->resize(stack->size() - own.size());
  stack->insert(stack->end(), results.begin(), results.end());
}

}  // namespace vgpu::aten
