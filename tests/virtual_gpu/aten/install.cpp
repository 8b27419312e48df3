// Registers the kernels when the library is loaded.
#include <string>
#include <unordered_set>

#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/library.h>

#include "virtual_gpu/aten/aten.h"

namespace vgpu::aten {
namespace {

/// Operators that only allocate or inspect, whose CUDA kernels run unchanged, and operators of kernels.cpp.
const std::unordered_set<std::string> kKept = {"aten::empty",
                                               "aten::empty_strided",
                                               "aten::record_stream",
                                               "aten::set_",
                                               "aten::resize_",
                                               "aten::resize",
                                               "aten::resize_as_",
                                               "aten::_resize_output_",
                                               "aten::_pin_memory",
                                               "aten::is_pinned",
                                               "aten::is_set_to",
                                               "aten::_local_scalar_dense",
                                               "aten::copy_",
                                               "aten::_fused_sdp_choice",
                                               "aten::_use_cudnn_ctc_loss",
                                               "aten::_use_miopen_ctc_loss",
                                               "aten::_thnn_fused_lstm_cell",
                                               "aten::_thnn_fused_lstm_cell_backward_impl"};

/// Operators without a CUDA kernel in the dispatcher; they would call cuDNN.
const std::unordered_set<std::string> kForced = {"aten::convolution_overrideable", "aten::convolution",
                                                 "aten::convolution_backward"};

std::vector<c10::RegistrationHandleRAII>& registrations() {
  static auto* all = new std::vector<c10::RegistrationHandleRAII>;
  return *all;
}

void install(const c10::OperatorName& name, c10::KernelFunction kernel) {
  registrations().push_back(c10::Dispatcher::singleton().registerImpl(name, c10::DispatchKey::CUDA, std::move(kernel),
                                                                      std::nullopt, nullptr, "virtual GPU"));
}

template <class Function>
void install(const char* name, Function* function) {
  install({name, ""}, c10::KernelFunction::makeFromUnboxedRuntimeFunction(function));
}

/// Views share memory: the CUDA kernel creates the correct view.
bool is_view(const c10::FunctionSchema& schema) {
  for (const c10::Argument& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

bool is_replaced(const c10::OperatorHandle& op) {
  const c10::OperatorName& name = op.operator_name();
  if (!op.hasSchema() || !name.name.starts_with("aten::") || kKept.contains(name.name) || is_view(op.schema()))
    return false;
  return op.hasKernelForDispatchKey(c10::DispatchKey::CUDA) ||
         (kForced.contains(name.name) && name.overload_name.empty());
}

/// Suppresses the dispatcher's warning about replaced kernels: the replacement is intended.
struct NoWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void attach_to_allocator() {
  using Trace = c10::cuda::CUDACachingAllocator::TraceEntry;
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const Trace& trace) {
    if (trace.action_ != Trace::ALLOC) return;
    poison(trace.device_, trace.stream_, reinterpret_cast<void*>(trace.addr_), trace.size_);
  });
}

struct Install {
  Install() {
    NoWarnings none;
    const c10::WarningUtils::WarningHandlerGuard quiet(&none);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      const auto op = dispatcher.findOp(name);
      if (op && is_replaced(*op)) install(name, c10::KernelFunction::makeFromBoxedFunction<&run_on_cpu>());
    }
    install("aten::copy_", copy_);
    install("aten::_fused_sdp_choice", sdp_choice);
    install("aten::_thnn_fused_lstm_cell", lstm_cell);
    install("aten::_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
    at::globalContext().setUserEnabledCuDNN(false);
  }
};
const Install installed;

}  // namespace

void poison_allocations() {
  static const bool attached = (attach_to_allocator(), true);
  static_cast<void>(attached);
}

}  // namespace vgpu::aten
