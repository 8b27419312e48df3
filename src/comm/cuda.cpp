#include "comm/cuda.h"

#include <ddpkit/error.h>

#ifdef DDPKIT_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <torch/csrc/cuda/nccl.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <utility>

namespace ddpkit::cuda {
namespace {

/// The graphs that are being captured.
class Captures {
 public:
  static Captures& all() {
    static auto* captures = new Captures;  // Never destroyed: static objects may capture.
    return *captures;
  }
  void add(std::weak_ptr<Graph> graph) {
    const std::lock_guard lock(mutex_);
    graphs_.push_back(std::move(graph));
  }
  void remove(const Graph* graph) {
    const std::lock_guard lock(mutex_);
    std::erase_if(graphs_, [&](const std::weak_ptr<Graph>& each) {
      const auto owned = each.lock();
      return !owned || owned.get() == graph;
    });
  }
  std::vector<std::shared_ptr<Graph>> graphs() {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Graph>> graphs;
    for (const auto& each : graphs_) {
      if (auto owned = each.lock()) graphs.push_back(std::move(owned));
    }
    return graphs;
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Graph>> graphs_;
};

class CapturedGraph final : public Graph, public std::enable_shared_from_this<CapturedGraph> {
 public:
  void begin_capture() override {
    Captures::all().add(weak_from_this());
    // Other threads (autograd, NCCL's watchdog) may make unsafe calls during the capture; only this thread must not.
    graph_->capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  }
  void end_capture() override {
    Captures::all().remove(this);
    graph_->capture_end();
  }

  bool add(std::shared_ptr<CapturedGroup> group) override {
    const std::lock_guard lock(mutex_);  // The collectives of a backward come from autograd's threads.
    if (std::ranges::find(groups_, group) != groups_.end()) return false;
    groups_.push_back(std::move(group));
    return true;
  }

  void replay() override {
    try {
      for (const auto& group : groups_) group->check_replay();
    } catch (const std::exception&) {
      release();
      throw;
    }
    const std::lock_guard lock(mutex_);
    if (!graph_) throw Error("GraphedStep: the graph was released, because a process group in it has ended");
    graph_->replay();
    if (groups_.empty()) return;
    auto end = std::make_shared<at::cuda::CUDAEvent>();
    end->record();
    for (const auto& group : groups_) group->watch_replay(reached([end] { return end->query(); }));
  }

  void release() noexcept override {
    const std::lock_guard lock(mutex_);
    graph_.reset();
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<CapturedGroup>> groups_;
  std::unique_ptr<at::cuda::CUDAGraph> graph_ = std::make_unique<at::cuda::CUDAGraph>();  ///< Destroyed before groups_.
};

}  // namespace

int device_count() { return c10::cuda::device_count(); }
void set_device(c10::Device device) { c10::cuda::set_device(device.index()); }

bool reduce(const std::vector<at::Tensor>& parts, const std::vector<c10::Stream>& streams) {
  const auto type = parts[0].scalar_type();
  if (type != at::kFloat && type != at::kDouble && type != at::kHalf && type != at::kBFloat16) return false;
  torch::cuda::nccl::stream_list nccl_streams;
  for (const c10::Stream& stream : streams) nccl_streams.emplace_back(at::cuda::CUDAStream(stream));
  at::Tensor sum = parts[0];
  // LibTorch keeps one communicator per device. This thread calls all of them, as one group.
  torch::cuda::nccl::reduce(parts, sum, /*root=*/0, static_cast<int>(torch::cuda::nccl::ncclRedOp::Sum), nccl_streams);
  return true;
}

std::function<bool()> reached(std::function<bool()> query) {
  return [query = std::move(query)] {
    const c10::cuda::CUDAStreamCaptureModeGuard mode{cudaStreamCaptureModeThreadLocal};
    return query();
  };
}

std::shared_ptr<Graph> create_graph() { return std::make_shared<CapturedGraph>(); }
std::vector<std::shared_ptr<Graph>> graphs_in_capture() { return Captures::all().graphs(); }

}  // namespace ddpkit::cuda

#else

namespace ddpkit::cuda {

int device_count() { return 0; }
void set_device(c10::Device) {}
bool reduce(const std::vector<at::Tensor>&, const std::vector<c10::Stream>&) { return false; }
std::vector<std::shared_ptr<Graph>> graphs_in_capture() { return {}; }
std::shared_ptr<Graph> create_graph() {
  throw InvalidArgument(
      "this build of ddpkit has no CUDA graphs: build the CUDA configuration (cmake --preset cuda, or "
      "-DDDPKIT_CUDA=ON)");
}

}  // namespace ddpkit::cuda
#endif
