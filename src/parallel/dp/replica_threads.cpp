#include "parallel/dp/replica_threads.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <string>
#include <utility>

#include <ddpkit/error.h>

#include "tensor/autocast_cache.h"

namespace ddpkit {
namespace {

thread_local bool in_replica_thread = false;

}  // namespace

ReplicaThreads::ReplicaThreads(std::vector<c10::Device> devices, int threads_each)
    : devices_(std::move(devices)), wanted_(devices_.size()), errors_(devices_.size()) {
  // at::set_num_threads() is per thread, but the last value is also the initial value of new threads. So it is
  // restored.
  const int before = at::get_num_threads();
  running_ = static_cast<int>(devices_.size());
  for (int r = 0; r < static_cast<int>(devices_.size()); ++r)
    threads_.emplace_back([this, r, threads_each] { loop(r, threads_each); });
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return running_ == 0; });
  at::set_num_threads(before);
}

ReplicaThreads::~ReplicaThreads() {
  {
    const std::lock_guard lock(mutex_);
    end_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ReplicaThreads::loop(int replica, int threads_each) {
  in_replica_thread = true;
  optim::disable_autocast_cache();
  const auto index = static_cast<std::size_t>(replica);
  std::unique_lock lock(mutex_);
  at::get_num_threads();  // The first call in a thread sets its number of threads: call it before setting ours.
  at::set_num_threads(threads_each);
  if (--running_ == 0) done_.notify_one();
  while (true) {
    work_.wait(lock, [&] { return end_ || wanted_[index]; });
    if (end_) return;
    wanted_[index] = false;
    const auto* const job = job_;
    const auto* const state = state_;
    lock.unlock();
    std::exception_ptr error;
    try {
      const at::ThreadLocalStateGuard guard(*state);
      (*job)(replica);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    errors_[index] = std::move(error);
    if (--running_ == 0) done_.notify_one();
  }
}

void ReplicaThreads::refuse_nested() {
  if (in_replica_thread)
    throw InvalidArgument(
        "DataParallel is called from within a replica: in a loss function call the forward of the replica it is given");
}

void ReplicaThreads::run(int count, const std::function<void(int)>& job) {
  const at::ThreadLocalState state;
  std::unique_lock lock(mutex_);
  job_ = &job;
  state_ = &state;
  running_ = count;
  for (int r = 0; r < count; ++r) wanted_[static_cast<std::size_t>(r)] = true;
  work_.notify_all();
  done_.wait(lock, [this] { return running_ == 0; });
  for (int r = 0; r < count; ++r) {
    if (errors_[static_cast<std::size_t>(r)]) rethrow(r, count);
  }
}

void ReplicaThreads::rethrow(int replica, int count) const {
  const auto index = static_cast<std::size_t>(replica);
  const auto message = [&](const std::string& what) {
    return fmt::format("DataParallel: replica {} of {} on {}: {}", replica, count, devices_[index].str(), what);
  };
  const Error::Context context{.call = "DataParallel"};
  try {
    std::rethrow_exception(errors_[index]);
  } catch (const InvalidArgument& error) {
    std::throw_with_nested(InvalidArgument(message(error.what()), context));
  } catch (const c10::Error& error) {
    std::throw_with_nested(Error(message(error.what_without_backtrace()), context));
  } catch (const std::exception& error) {
    std::throw_with_nested(Error(message(error.what()), context));
  } catch (...) {
    std::throw_with_nested(Error(message("an exception that is no std::exception"), context));
  }
}

}  // namespace ddpkit
