// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "finding.h"

namespace ddpkit::cli {

/// One GPU that the driver reports. CUDA_VISIBLE_DEVICES has no effect.
struct Gpu {
  std::string name = {};
  std::string uuid = {};
  std::uint64_t free_bytes = 0, total_bytes = 0;
  int compute_major = 0, compute_minor = 0;
};

/// Reports of the driver's library (NVML) and of NCCL. Both are loaded at run time.
struct GpuSystem {
  std::string driver = {};  ///< Version; empty: no driver.
  std::vector<Gpu> gpus = {};
  std::vector<std::string> links = {};  ///< "GPU 0 - GPU 1: NVLink, peer access".
  bool all_nvlink = false;
  std::string nccl = {};  ///< Version; empty: not found.
};
GpuSystem read_gpus();

/// `visible`: CUDA_VISIBLE_DEVICES, if set. `built_for_cuda`: this build of ddpkit. `usable`: number of GPUs that
/// LibTorch can use.
Findings examine_gpus(const GpuSystem& system, const std::optional<std::string>& visible, bool built_for_cuda,
                      int usable);

}  // namespace ddpkit::cli
