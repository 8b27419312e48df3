#include "comm/backends/registered_memory.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>

namespace ddpkit {

at::Tensor allocate_registered(c10d::Backend& backend, at::IntArrayRef sizes, const at::TensorOptions& options) {
  std::string why = "NCCL or the GPU has no support for it";
  try {
    if (backend.supportsTensorAlloc(options.device().index()))
      return backend.allocateTensor(c10::multiply_integers(sizes), options).view(sizes);
    if (backend.getSize() == 1 || backend.getBackendName() != "nccl") return {};
  } catch (const c10::Error& error) {
    why = error.what_without_backtrace();
  }
  // It works all the same, only slower.
  TORCH_WARN_ONCE("ddpkit: memory for collectives on ", options.device().str(), " is not registered with NCCL: ", why);
  return {};
}

}  // namespace ddpkit
