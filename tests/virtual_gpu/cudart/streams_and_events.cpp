// The calls of streams, events and graphs.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "virtual_gpu/cudart/api.h"
#include "virtual_gpu/cudart/stream.h"

namespace vgpu {
namespace {

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t recorded = 0, reached = 0;
  std::chrono::steady_clock::time_point time;
  std::shared_ptr<Graph> graph;  ///< The event was recorded while its stream was captured.

  void reach(std::uint64_t number) {
    const std::lock_guard lock(mutex);
    reached = std::max(reached, number);
    time = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  void wait(std::uint64_t number) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return reached >= number; });
  }
};

/// Handles of CUDA point to shared pointers: a stream may still wait for an event that the host has destroyed.
template <class T>
using Handle = std::shared_ptr<T>*;

const std::shared_ptr<Event>& event_of(cudaEvent_t handle) { return *reinterpret_cast<Handle<Event>>(handle); }
const std::shared_ptr<Graph>& graph_of(void* handle) { return *static_cast<Handle<Graph>>(handle); }

std::uint64_t next_graph_id() {
  static std::atomic<std::uint64_t> id = 0;
  return ++id;
}

cudaError_t unknown_stream() { return fail(cudaErrorInvalidResourceHandle); }

/// A stream that waits for an event of a capture joins the capture.
cudaError_t join(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Graph>& graph) {
  const auto own = stream->graph();
  if (own == graph) return cudaSuccess;
  if (own) return fail(cudaErrorStreamCaptureIsolation);
  stream->set_graph(graph);
  graph->streams.push_back(stream);
  return cudaSuccess;
}

}  // namespace
}  // namespace vgpu

VGPU_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = reinterpret_cast<cudaStream_t>(vgpu::create_stream().get());
  return cudaSuccess;
}

VGPU_API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

VGPU_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

VGPU_API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return vgpu::destroy_stream(stream) ? cudaSuccess : vgpu::unknown_stream();
}

VGPU_API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  const auto stream = vgpu::find_stream(handle);
  if (!stream) return vgpu::unknown_stream();
  if (stream->graph()) return vgpu::fail(cudaErrorStreamCaptureUnsupported);
  stream->wait();
  return cudaSuccess;
}

VGPU_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const auto stream = vgpu::find_stream(handle);
  if (!stream) return vgpu::unknown_stream();
  if (stream->graph()) return vgpu::fail(cudaErrorStreamCaptureUnsupported);
  return stream->is_idle() ? cudaSuccess : cudaErrorNotReady;
}

VGPU_API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

VGPU_API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  vgpu::enqueue(stream, [=] { function(stream, cudaSuccess, data); });
  return cudaSuccess;
}

VGPU_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  vgpu::enqueue(stream, [=] { function(data); });
  return cudaSuccess;
}

VGPU_API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  const auto stream = vgpu::find_stream(handle);
  if (!stream) return vgpu::unknown_stream();
  const auto event = vgpu::event_of(event_handle);
  std::unique_lock lock(event->mutex);
  if (const auto graph = event->graph) return vgpu::join(stream, graph);
  const std::uint64_t target = event->recorded;
  if (event->reached >= target) return cudaSuccess;
  lock.unlock();
  vgpu::enqueue(handle, [event, target] { event->wait(target); });
  return cudaSuccess;
}

VGPU_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new std::shared_ptr<vgpu::Event>(std::make_shared<vgpu::Event>()));
  return cudaSuccess;
}

VGPU_API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

VGPU_API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<vgpu::Handle<vgpu::Event>>(event);
  return cudaSuccess;
}

VGPU_API cudaError_t cudaEventRecord(cudaEvent_t event_handle, cudaStream_t handle) {
  const auto stream = vgpu::find_stream(handle);
  if (!stream) return vgpu::unknown_stream();
  const auto event = vgpu::event_of(event_handle);
  std::unique_lock lock(event->mutex);
  event->graph = stream->graph();
  if (event->graph) return cudaSuccess;
  const std::uint64_t number = ++event->recorded;
  lock.unlock();
  vgpu::enqueue(handle, [event, number] { event->reach(number); });
  return cudaSuccess;
}

VGPU_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

VGPU_API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  const auto event = vgpu::event_of(handle);
  const std::lock_guard lock(event->mutex);
  return event->reached >= event->recorded ? cudaSuccess : cudaErrorNotReady;
}

VGPU_API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  const auto event = vgpu::event_of(handle);
  std::unique_lock lock(event->mutex);
  event->changed.wait(lock, [&, target = event->recorded] { return event->reached >= target; });
  return cudaSuccess;
}

VGPU_API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin_handle, cudaEvent_t end_handle) {
  const auto begin = vgpu::event_of(begin_handle), end = vgpu::event_of(end_handle);
  if (cudaEventQuery(begin_handle) != cudaSuccess || cudaEventQuery(end_handle) != cudaSuccess)
    return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
  return cudaSuccess;
}

VGPU_API cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(handle, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

VGPU_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                              unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                              const cudaGraphEdgeData**, size_t*) {
  const auto stream = vgpu::find_stream(handle);
  if (!stream) return vgpu::unknown_stream();
  const auto graph = stream->graph();
  *status = graph ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = graph ? graph->id : 0;
  return cudaSuccess;
}

VGPU_API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  const auto stream = vgpu::find_stream(handle);
  if (!stream) return vgpu::unknown_stream();
  if (stream->graph()) return vgpu::fail(cudaErrorIllegalState);
  stream->wait();
  auto graph = std::make_shared<vgpu::Graph>();
  graph->id = vgpu::next_graph_id();
  graph->streams = {stream};
  stream->set_graph(graph);
  return cudaSuccess;
}

VGPU_API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
  const auto stream = vgpu::find_stream(handle);
  const auto graph = stream ? stream->graph() : nullptr;
  if (!graph || graph->streams.front() != stream) return vgpu::fail(cudaErrorIllegalState);
  for (const auto& each : graph->streams) each->set_graph(nullptr);
  graph->streams.clear();
  *out = reinterpret_cast<cudaGraph_t>(new std::shared_ptr<vgpu::Graph>(graph));
  return cudaSuccess;
}

VGPU_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

VGPU_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new std::shared_ptr<vgpu::Graph>(vgpu::graph_of(graph)));
  return cudaSuccess;
}

VGPU_API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  vgpu::enqueue(stream, [graph = vgpu::graph_of(executable)] {
    for (const vgpu::Task& task : graph->tasks) task();
  });
  return cudaSuccess;
}

VGPU_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<vgpu::Handle<vgpu::Graph>>(executable);
  return cudaSuccess;
}

VGPU_API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<vgpu::Handle<vgpu::Graph>>(graph);
  return cudaSuccess;
}

VGPU_API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = vgpu::graph_of(graph)->tasks.size();
  return cudaSuccess;
}

VGPU_UNSUPPORTED(cudaGraphNodeGetDependencies, cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t*)
VGPU_UNSUPPORTED(cudaGraphDebugDotPrint, cudaGraph_t, const char*, unsigned)
VGPU_UNSUPPORTED(cudaIpcGetEventHandle, cudaIpcEventHandle_t*, cudaEvent_t)
VGPU_UNSUPPORTED(cudaIpcOpenEventHandle, cudaEvent_t*, cudaIpcEventHandle_t)
