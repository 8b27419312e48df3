// Streams are threads. A captured graph is a list of tasks.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "virtual_gpu/vgpu.h"

namespace vgpu {

class Stream;

struct Graph {
  std::uint64_t id = 0;
  /// Streams under capture. The first stream began the capture, the others joined it by an event.
  std::vector<std::shared_ptr<Stream>> streams;
  /// In the order of capture, which is also the order of replay.
  std::vector<Task> tasks;
  std::vector<std::pair<std::string, std::vector<Access>>> accesses;  ///< Of each task, and the task's name.
  std::atomic<bool> invalid = false;  ///< A prohibited call was made during the capture.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread = std::this_thread::get_id();  ///< The thread that began the capture.
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  /// `number` selects the stream's sequence of delays.
  Stream(int device, std::uint32_t number);

  void push(Task task);
  void wait();
  bool is_idle();
  /// The thread ends after the last task. Later tasks are lost.
  void end();

  int device() const { return device_; }
  std::uint32_t number() const { return number_; }
  std::shared_ptr<Graph> graph();
  void set_graph(std::shared_ptr<Graph> graph);

 private:
  void run();
  void delay();

  const int device_;
  const std::uint32_t number_;
  std::mt19937 random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::uint64_t pushed_ = 0, done_ = 0;
  bool has_thread_ = false, ended_ = false;
  std::shared_ptr<Graph> graph_;
};

std::shared_ptr<Stream> create_stream();
/// Null if the handle is unknown. The handles 0 to 2 are the default stream of the current device.
std::shared_ptr<Stream> find_stream(void* handle);
bool destroy_stream(void* handle);
/// As synchronize(), for all streams of the current device.
void wait_for_device();
void set_current_device(int device);

}  // namespace vgpu
