// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "finding.h"

namespace ddpkit::cli {

/// One GPU as the driver sees it, whatever CUDA_VISIBLE_DEVICES says.
struct Gpu {
  std::string name = {};
  std::string uuid = {};
  std::uint64_t free_bytes = 0, total_bytes = 0;
  int compute_major = 0, compute_minor = 0;
};

/// What the driver's own library (NVML) and NCCL tell, both looked for when the program runs.
struct GpuSystem {
  std::string driver = {};  ///< Version; empty: there is no driver.
  std::vector<Gpu> gpus = {};
  std::vector<std::string> links = {};  ///< "GPU 0 - GPU 1: NVLink, peer access".
  bool all_nvlink = false;
  std::string nccl = {};  ///< Version; empty: not found.
};
GpuSystem read_gpus();

/// `visible`: CUDA_VISIBLE_DEVICES, if it is set; `built_for_cuda`: this ddpkit; `usable`: GPUs that LibTorch can use.
Findings examine_gpus(const GpuSystem& system, const std::optional<std::string>& visible, bool built_for_cuda,
                      int usable);

}  // namespace ddpkit::cli
