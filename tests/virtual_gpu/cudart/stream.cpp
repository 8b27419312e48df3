#include "virtual_gpu/cudart/stream.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

#include "virtual_gpu/cudart/order.h"

namespace vgpu {
namespace {

thread_local int device_of_thread = 0;
std::atomic<bool> lost = false;

/// Objects of this process are never destroyed: threads of streams may still run during exit.
struct Streams {
  std::mutex mutex;
  std::map<void*, std::shared_ptr<Stream>> created;
  std::map<int, std::shared_ptr<Stream>> defaults;
  std::uint32_t next_number = 0;
};

Streams& streams() {
  static auto* all = new Streams;
  return *all;
}

int count_devices() {
  const int count = static_cast<int>(setting("VGPU_COUNT", 4));
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return count;
  if (!*visible || std::strcmp(visible, "-1") == 0) return 0;
  const auto commas = std::count(visible, visible + std::strlen(visible), ',');
  return std::min(count, static_cast<int>(commas) + 1);
}

std::shared_ptr<Stream> known_stream(void* handle) {
  auto stream = find_stream(handle);
  if (stream) return stream;
  std::fprintf(stderr, "virtual GPU: work is queued on a stream that was destroyed\n");
  std::abort();
}

}  // namespace

Stream::Stream(int device, std::uint32_t number)
    : device_(device), number_(number), random_(static_cast<std::uint32_t>(setting("VGPU_SEED", 0)) * 1000 + number) {}

void Stream::push(Task task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  ++pushed_;
  if (!has_thread_) std::thread([self = shared_from_this()] { self->run(); }).detach();
  has_thread_ = true;
  changed_.notify_all();
}

void Stream::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&, target = pushed_] { return done_ >= target; });
}

bool Stream::is_idle() {
  const std::lock_guard lock(mutex_);
  return done_ == pushed_;
}

void Stream::end() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

std::shared_ptr<Graph> Stream::graph() {
  const std::lock_guard lock(mutex_);
  return graph_;
}

void Stream::set_graph(std::shared_ptr<Graph> graph) {
  const std::lock_guard lock(mutex_);
  graph_ = std::move(graph);
}

void Stream::run() {
  set_current_device(device_);
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return ended_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    delay();
    if (!devices_are_lost()) task();
    task = nullptr;  // Releases the task's objects before the host is notified of the task's end.
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

void Stream::delay() {
  static const long limit_us = setting("VGPU_JITTER_US", 0);
  if (limit_us <= 0 || random_() % 4 != 0) return;
  std::this_thread::sleep_for(std::chrono::microseconds(random_() % static_cast<std::uint32_t>(limit_us)));
}

std::shared_ptr<Stream> create_stream() {
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  auto stream = std::make_shared<Stream>(device_of_thread, ++all.next_number);
  all.created[stream.get()] = stream;
  return stream;
}

std::shared_ptr<Stream> find_stream(void* handle) {
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  if (reinterpret_cast<std::uintptr_t>(handle) > 2) {
    const auto found = all.created.find(handle);
    return found == all.created.end() ? nullptr : found->second;
  }
  auto& stream = all.defaults[device_of_thread];
  if (!stream) stream = std::make_shared<Stream>(device_of_thread, ++all.next_number);
  return stream;
}

bool destroy_stream(void* handle) {
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  const auto found = all.created.find(handle);
  if (found == all.created.end()) return false;
  found->second->end();
  all.created.erase(found);
  return true;
}

void wait_for_device() {
  std::vector<std::shared_ptr<Stream>> waited = {find_stream(nullptr)};
  {
    Streams& all = streams();
    const std::lock_guard lock(all.mutex);
    for (const auto& [handle, stream] : all.created)
      if (stream->device() == device_of_thread) waited.push_back(stream);
  }
  for (const auto& stream : waited) {
    const Clock tasks = clock_of(*stream);
    stream->wait();
    host_follows(tasks);
  }
}

void set_current_device(int device) { device_of_thread = device; }

void enqueue(void* handle, Task task) {
  const auto stream = known_stream(handle);
  if (const auto graph = stream->graph()) {
    graph->tasks.push_back(std::move(task));
  } else {
    stream->push(std::move(task));
  }
}

void check_order(void* handle, const std::string& what, const std::vector<Access>& accesses) {
  const auto stream = known_stream(handle);
  if (const auto graph = stream->graph()) {
    graph->accesses.emplace_back(what, accesses);
  } else {
    check_task(*stream, what, accesses);
  }
}

void wait_for(void* handle) {
  const auto stream = known_stream(handle);
  if (!stream->graph()) stream->wait();
}

void synchronize(void* handle) {
  const auto stream = known_stream(handle);
  if (stream->graph()) return;
  const Clock tasks = clock_of(*stream);
  stream->wait();
  host_follows(tasks);
}

bool is_capturing(void* handle) { return known_stream(handle)->graph() != nullptr; }

void lose_devices() { lost = true; }

bool devices_are_lost() { return lost; }

int current_device() { return device_of_thread; }

int device_count() {
  static const int count = count_devices();
  return count;
}

std::size_t device_memory() {
  static const long megabytes = setting("VGPU_MEMORY_MB", 8192);
  return static_cast<std::size_t>(megabytes) << 20;
}

const char* device_name() {
  const char* name = std::getenv("VGPU_NAME");
  return name ? name : "Virtual GPU";
}

int compute_capability() { return static_cast<int>(setting("VGPU_COMPUTE_CAPABILITY", 90)); }

long setting(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atol(text) : otherwise;
}

}  // namespace vgpu
