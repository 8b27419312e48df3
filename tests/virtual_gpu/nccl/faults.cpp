// VGPU_FAULT="rank=1 call=AllReduce n=37 do=hang" specifies a fault in the 37th all-reduce of rank 1.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>

#include "virtual_gpu/nccl/communicator.h"

namespace vgpu::nccl {
namespace {

struct Fault {
  int rank = -1;
  char call[32] = "";
  int number = 0;
  char action[32] = "";
};

Fault fault_of_environment() {
  Fault fault;
  const char* text = std::getenv("VGPU_FAULT");
  if (!text) return fault;
  if (std::sscanf(text, "rank=%d call=%31s n=%d do=%31s", &fault.rank, fault.call, &fault.number, fault.action) == 4)
    return fault;
  std::fprintf(stderr, "virtual NCCL: VGPU_FAULT is '%s'; write it as 'rank=1 call=AllReduce n=37 do=hang'\n", text);
  std::abort();
}

const Fault& fault_of_process() {
  static const Fault fault = fault_of_environment();
  return fault;
}

bool is_on_host(std::string_view action) { return action == "refuse" || action.starts_with("hold:"); }

void sleep_ms(const std::string& text) { std::this_thread::sleep_for(std::chrono::milliseconds(std::stol(text))); }

}  // namespace

ncclResult_t Communicator::run_host_fault(const char* call) {
  const Fault& fault = fault_of_process();
  if (!is_on_host(fault.action) || fault.rank != rank_ || std::string_view(fault.call) != call) return ncclSuccess;
  if (++calls_of_fault_ != fault.number) return ncclSuccess;
  const std::string action = fault.action;
  if (action == "refuse") return ncclInternalError;
  sleep_ms(action.substr(5));
  return ncclSuccess;
}

void Communicator::run_fault(const char* call) {
  const Fault& fault = fault_of_process();
  if (is_on_host(fault.action) || fault.rank != rank_ || std::string_view(fault.call) != call) return;
  static std::atomic<int> communicators = 0;
  if ((fault.call == kInit ? ++communicators : ++calls_of_fault_) != fault.number) return;
  const std::string action = fault.action;
  Backoff backoff;
  while (fault.call == kInit && segment_->joined < ranks_ - 1) backoff.pause();
  if (action == "die") ::raise(SIGKILL);
  if (action == "lost") lose_devices();
  if (action.starts_with("delay:")) sleep_ms(action.substr(6));
  if (action == "error") error_ = ncclRemoteError;
  while ((action == "hang" || action == "error") && !aborted_) backoff.pause();
}

}  // namespace vgpu::nccl
