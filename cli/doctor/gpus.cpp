#include "gpus.h"

#include <dlfcn.h>

#include <algorithm>

#include <fmt/format.h>

#include "host.h"

namespace ddpkit::cli {
namespace {

/// A shared library that may be missing.
class Library {
 public:
  explicit Library(const char* name) : handle_(::dlopen(name, RTLD_LAZY | RTLD_LOCAL)) {}
  ~Library() {
    if (handle_) ::dlclose(handle_);
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  explicit operator bool() const { return handle_ != nullptr; }
  /// Returns null if the library has no function with this name.
  template <class Function>
  Function* get(const char* name) const {
    return handle_ ? reinterpret_cast<Function*>(::dlsym(handle_, name)) : nullptr;
  }

 private:
  void* handle_;
};

/// Functions of NVML, with the names of nvml.h (API version 2). 0 is success.
class Nvml {
 public:
  using Device = void*;
  struct Memory {
    unsigned long long total, free, used;
  };

  Nvml() : library_("libnvidia-ml.so.1") {
    const auto init = library_.get<int()>("nvmlInit_v2");
    ready_ = init && init() == 0;
  }
  ~Nvml() {
    if (const auto shutdown = library_.get<int()>("nvmlShutdown"); ready_ && shutdown) shutdown();
  }

  explicit operator bool() const { return ready_; }

  template <class... Arguments>
  bool call(const char* name, Arguments... arguments) const {
    const auto function = library_.get<int(Arguments...)>(name);
    return function && function(arguments...) == 0;
  }

 private:
  Library library_;
  bool ready_ = false;
};

constexpr int kP2pNvlink = 2, kP2pRead = 0;  // nvmlGpuP2PCapsIndex_t

void read_links(const Nvml& nvml, const std::vector<Nvml::Device>& devices, GpuSystem& system) {
  system.all_nvlink = devices.size() > 1;
  for (std::size_t a = 0; a < devices.size(); ++a) {
    for (std::size_t b = a + 1; b < devices.size(); ++b) {
      int nvlink = -1, peer = -1;
      nvml.call("nvmlDeviceGetP2PStatus", devices[a], devices[b], kP2pNvlink, &nvlink);
      nvml.call("nvmlDeviceGetP2PStatus", devices[a], devices[b], kP2pRead, &peer);
      system.all_nvlink = system.all_nvlink && nvlink == 0;
      system.links.push_back(fmt::format("GPU {} - GPU {}: {}, {}", a, b, nvlink == 0 ? "NVLink" : "PCIe",
                                         peer == 0 ? "peer access" : "no peer access"));
    }
  }
}

}  // namespace

GpuSystem read_gpus() {
  GpuSystem system;
  const Nvml nvml;
  if (nvml) {
    char text[96] = {};
    if (nvml.call("nvmlSystemGetDriverVersion", static_cast<char*>(text), unsigned{sizeof text})) system.driver = text;
    unsigned count = 0;
    nvml.call("nvmlDeviceGetCount_v2", &count);
    std::vector<Nvml::Device> devices;
    for (unsigned i = 0; i < count; ++i) {
      Nvml::Device device = nullptr;
      if (!nvml.call("nvmlDeviceGetHandleByIndex_v2", i, &device)) continue;
      devices.push_back(device);
      Gpu gpu;
      if (nvml.call("nvmlDeviceGetName", device, static_cast<char*>(text), unsigned{sizeof text})) gpu.name = text;
      if (nvml.call("nvmlDeviceGetUUID", device, static_cast<char*>(text), unsigned{sizeof text})) gpu.uuid = text;
      Nvml::Memory memory{};
      if (nvml.call("nvmlDeviceGetMemoryInfo", device, &memory)) {
        gpu.free_bytes = memory.free;
        gpu.total_bytes = memory.total;
      }
      nvml.call("nvmlDeviceGetCudaComputeCapability", device, &gpu.compute_major, &gpu.compute_minor);
      system.gpus.push_back(gpu);
    }
    read_links(nvml, devices, system);
  }
  const Library nccl("libnccl.so.2");
  int version = 0;
  if (const auto get = nccl.get<int(int*)>("ncclGetVersion"); get && get(&version) == 0)
    system.nccl = fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
  return system;
}

Findings examine_gpus(const GpuSystem& system, const std::optional<std::string>& visible, bool built_for_cuda,
                      int usable) {
  Findings findings;
  const auto add = [&](Severity severity, std::string what, std::string advice = {}, double gain = 0) {
    findings.push_back({"GPUs", severity, std::move(what), std::move(advice), gain});
  };
  if (system.gpus.empty()) {
    add(Severity::kFine, system.driver.empty()
                             ? "no NVIDIA driver answers: training runs on the CPU"
                             : fmt::format("driver {}, but no GPU: training runs on the CPU", system.driver));
    if (visible) add(Severity::kFine, fmt::format("CUDA_VISIBLE_DEVICES is \"{}\", and hides nothing", *visible));
    return findings;
  }
  add(Severity::kFine, fmt::format("driver {}", system.driver));
  for (std::size_t i = 0; i < system.gpus.size(); ++i) {
    const Gpu& gpu = system.gpus[i];
    add(Severity::kFine,
        fmt::format("GPU {}: {}, {} of {} free, compute capability {}.{}", i, gpu.name,
                    in_units(static_cast<double>(gpu.free_bytes)), in_units(static_cast<double>(gpu.total_bytes)),
                    gpu.compute_major, gpu.compute_minor));
    if (gpu.free_bytes < gpu.total_bytes / 2)
      add(Severity::kAdvice, fmt::format("GPU {} is more than half full", i),
          fmt::format("See with nvidia-smi who uses GPU {}: training there may run out of memory.", i), 1.5);
    if (gpu.compute_major >= 8) add(Severity::kFine, fmt::format("GPU {} has bfloat16 and TensorFloat-32", i));
  }
  for (const std::string& link : system.links) add(Severity::kFine, link);
  if (system.gpus.size() > 1 && !system.all_nvlink)
    add(Severity::kAdvice, "not all GPUs are joined by NVLink",
        "Prefer large batches or gradient accumulation: all-reduce over PCIe is some 20 times as slow as over NVLink.",
        1.2);
  if (visible && visible->empty())
    add(Severity::kProblem, fmt::format("CUDA_VISIBLE_DEVICES is empty: it hides all {} GPUs", system.gpus.size()),
        "Unset CUDA_VISIBLE_DEVICES, or name the GPUs to train on.", 100);
  else if (visible)
    add(Severity::kFine, fmt::format("CUDA_VISIBLE_DEVICES is \"{}\"", *visible));
  if (!built_for_cuda)
    add(Severity::kAdvice, "this ddpkit is built for CPUs: it does not use the GPUs",
        "Build it for CUDA: script/bootstrap --cuda && script/build cuda.", 50);
  else if (usable == 0 && !(visible && visible->empty()))
    add(Severity::kProblem, "LibTorch can use none of the GPUs",
        "The driver is likely older than LibTorch's CUDA 13 wants (580): update it.", 100);
  if (system.nccl.empty())
    add(Severity::kFine, "NCCL is not among the system's libraries: LibTorch's CUDA set brings its own");
  else
    add(Severity::kFine, fmt::format("NCCL {}", system.nccl));
  return findings;
}

}  // namespace ddpkit::cli
