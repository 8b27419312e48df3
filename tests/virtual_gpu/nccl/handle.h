// NCCL's handle of a communicator, and its registered memory.
#pragma once

#include <memory>

#include "virtual_gpu/nccl/communicator.h"

#define VGPU_API extern "C" __attribute__((visibility("default")))

/// The handle lives until the process ends, so that a use after its destruction is reported.
struct ncclComm {
  std::shared_ptr<vgpu::nccl::Communicator> communicator;
};

namespace vgpu::nccl {

/// Aborts the process if the communicator has ended.
const std::shared_ptr<Communicator>& communicator_of(ncclComm_t handle);

/// A communicator that ends releases its registrations.
void end_registrations(ncclComm_t handle);

}  // namespace vgpu::nccl
