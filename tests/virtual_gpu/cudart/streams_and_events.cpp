// The calls of streams, events and graphs.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "virtual_gpu/cudart/api.h"
#include "virtual_gpu/cudart/order.h"
#include "virtual_gpu/cudart/stream.h"

namespace vgpu {
namespace {

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t recorded = 0, reached = 0;
  std::chrono::steady_clock::time_point time;
  bool captured = false;       ///< Recorded while its stream was captured.
  std::weak_ptr<Graph> graph;  ///< Of this capture.
  Clock tasks;                 ///< The tasks before the last record.
  const int device = current_device();

  void reach(std::uint64_t number) {
    const std::lock_guard lock(mutex);
    reached = std::max(reached, number);
    time = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  /// Also returns if the devices are lost.
  void wait(std::uint64_t number) {
    std::unique_lock lock(mutex);
    while (reached < number && !devices_are_lost()) changed.wait_for(lock, std::chrono::milliseconds(20));
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

/// The default stream cannot be captured.
bool is_legacy(cudaStream_t handle) { return handle == nullptr || handle == cudaStreamLegacy; }

struct Captures {
  std::mutex mutex;
  std::vector<std::shared_ptr<Graph>> running;
};

Captures& captures() {
  static auto* all = new Captures;
  return *all;
}

thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

/// A stream that waits for an event of a capture joins the capture.
cudaError_t join(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Graph>& graph) {
  const auto own = stream->graph();
  if (own == graph) return cudaSuccess;
  if (graph->streams.empty()) return fail(cudaErrorCapturedEvent);  // The capture has ended.
  if (own) return fail(cudaErrorStreamCaptureIsolation);
  stream->set_graph(graph);
  graph->streams.push_back(stream);
  return cudaSuccess;
}

/// Runs a function of the program on a stream. If VGPU_SERIAL_HOST_FUNC is 1, no two run at the same time.
void call_host(const Task& function) {
  static const bool serial = setting("VGPU_SERIAL_HOST_FUNC", 0) != 0;
  static std::mutex mutex;
  std::unique_lock lock(mutex, std::defer_lock);
  if (serial) lock.lock();
  function();
}

}  // namespace

bool is_prohibited_by_capture() {
  if (mode_of_thread == cudaStreamCaptureModeRelaxed) return false;
  const std::lock_guard lock(captures().mutex);
  bool prohibited = false;
  for (const auto& graph : captures().running) {
    const bool own = graph->thread == std::this_thread::get_id();
    if (own ? graph->mode == cudaStreamCaptureModeRelaxed
            : graph->mode != cudaStreamCaptureModeGlobal || mode_of_thread != cudaStreamCaptureModeGlobal)
      continue;
    graph->invalid = prohibited = true;
  }
  return prohibited;
}

}  // namespace vgpu

VGPU_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  VGPU_RETURN_IF_LOST();
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
  VGPU_RETURN_IF_LOST();
  if (stream->graph()) return vgpu::fail(cudaErrorStreamCaptureUnsupported);
  vgpu::synchronize(handle);
  VGPU_RETURN_IF_LOST();
  return cudaSuccess;
}

VGPU_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const auto stream = vgpu::find_stream(handle);
  if (!stream) return vgpu::unknown_stream();
  VGPU_RETURN_IF_LOST();
  if (stream->graph()) return vgpu::fail(cudaErrorStreamCaptureUnsupported);
  const vgpu::Clock tasks = vgpu::clock_of(*stream);
  if (!stream->is_idle()) return cudaErrorNotReady;
  vgpu::host_has_polled(tasks);
  return cudaSuccess;
}

VGPU_API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

VGPU_API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  VGPU_RETURN_IF_LOST();
  vgpu::enqueue(stream, [=] { vgpu::call_host([=] { function(stream, cudaSuccess, data); }); });
  return cudaSuccess;
}

VGPU_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  VGPU_RETURN_IF_LOST();
  const auto known = vgpu::find_stream(stream);
  if (!known || known->device() != vgpu::current_device()) return vgpu::unknown_stream();
  vgpu::enqueue(stream, [=] { vgpu::call_host([=] { function(data); }); });
  return cudaSuccess;
}

VGPU_API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  const auto stream = vgpu::find_stream(handle);
  if (!stream) return vgpu::unknown_stream();
  VGPU_RETURN_IF_LOST();
  const auto event = vgpu::event_of(event_handle);
  std::unique_lock lock(event->mutex);
  if (const auto graph = event->graph.lock())
    return vgpu::is_legacy(handle) ? vgpu::fail(cudaErrorStreamCaptureImplicit) : vgpu::join(stream, graph);
  const std::uint64_t target = event->recorded;
  if (stream->graph()) return target ? vgpu::fail(cudaErrorStreamCaptureIsolation) : cudaSuccess;
  vgpu::stream_follows(*stream, event->tasks);
  if (event->reached >= target) return cudaSuccess;
  lock.unlock();
  vgpu::enqueue(handle, [event, target] { event->wait(target); });
  return cudaSuccess;
}

VGPU_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  VGPU_RETURN_IF_LOST();
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
  VGPU_RETURN_IF_LOST();
  const auto event = vgpu::event_of(event_handle);
  if (event->device != stream->device()) return vgpu::unknown_stream();
  std::unique_lock lock(event->mutex);
  const auto graph = stream->graph();
  event->graph = graph;
  event->captured = graph != nullptr;
  if (graph) return cudaSuccess;
  event->tasks = vgpu::clock_of(*stream);
  const std::uint64_t number = ++event->recorded;
  lock.unlock();
  vgpu::enqueue(handle, [event, number] { event->reach(number); });
  return cudaSuccess;
}

VGPU_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

VGPU_API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  VGPU_RETURN_IF_LOST();
  VGPU_RETURN_IF_CAPTURED();
  const auto event = vgpu::event_of(handle);
  const std::lock_guard lock(event->mutex);
  if (event->captured) return vgpu::fail(cudaErrorCapturedEvent);
  if (event->reached < event->recorded) return cudaErrorNotReady;
  vgpu::host_has_polled(event->tasks);
  return cudaSuccess;
}

VGPU_API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  VGPU_RETURN_IF_LOST();
  VGPU_RETURN_IF_CAPTURED();
  const auto event = vgpu::event_of(handle);
  std::unique_lock lock(event->mutex);
  if (event->captured) return vgpu::fail(cudaErrorCapturedEvent);
  const std::uint64_t target = event->recorded;
  const vgpu::Clock tasks = event->tasks;
  lock.unlock();
  event->wait(target);
  VGPU_RETURN_IF_LOST();
  vgpu::host_follows(tasks);
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

VGPU_API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  VGPU_RETURN_IF_LOST();
  const auto stream = vgpu::find_stream(handle);
  if (!stream) return vgpu::unknown_stream();
  if (stream->graph()) return vgpu::fail(cudaErrorIllegalState);
  if (vgpu::is_legacy(handle)) return vgpu::fail(cudaErrorStreamCaptureUnsupported);
  stream->wait();
  auto graph = std::make_shared<vgpu::Graph>();
  graph->id = vgpu::next_graph_id();
  graph->streams = {stream};
  graph->mode = mode;
  stream->set_graph(graph);
  const std::lock_guard lock(vgpu::captures().mutex);
  vgpu::captures().running.push_back(graph);
  return cudaSuccess;
}

VGPU_API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
  const auto stream = vgpu::find_stream(handle);
  const auto graph = stream ? stream->graph() : nullptr;
  if (!graph || graph->streams.front() != stream) return vgpu::fail(cudaErrorIllegalState);
  for (const auto& each : graph->streams) each->set_graph(nullptr);
  graph->streams.clear();
  {
    const std::lock_guard lock(vgpu::captures().mutex);
    std::erase(vgpu::captures().running, graph);
  }
  if (graph->invalid) return vgpu::fail(cudaErrorStreamCaptureInvalidated);
  *out = reinterpret_cast<cudaGraph_t>(new std::shared_ptr<vgpu::Graph>(graph));
  return cudaSuccess;
}

VGPU_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, vgpu::mode_of_thread);
  return cudaSuccess;
}

VGPU_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new std::shared_ptr<vgpu::Graph>(vgpu::graph_of(graph)));
  return cudaSuccess;
}

VGPU_API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  VGPU_RETURN_IF_LOST();
  for (const auto& [what, accesses] : vgpu::graph_of(executable)->accesses) vgpu::check_order(stream, what, accesses);
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
