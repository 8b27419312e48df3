// Tier 1: c10/core/Device.h. The threads of DataParallel, one a replica, kept between calls.
#pragma once

#include <c10/core/Device.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace at {
class ThreadLocalState;
}

namespace ddpkit {

class ReplicaThreads {
 public:
  /// `threads_each`: threads inside an operator that one of these threads calls.
  ReplicaThreads(std::vector<c10::Device> devices, int threads_each);
  /// Not from one of these threads.
  ~ReplicaThreads();
  ReplicaThreads(const ReplicaThreads&) = delete;
  ReplicaThreads& operator=(const ReplicaThreads&) = delete;

  /// Calls job(replica) in the threads of the first `count` replicas, with the caller's grad mode, autocast and the
  /// like, and returns when all have ended. One run at a time. Throws the error of the first replica that failed, as an
  /// Error that names it; the original is nested in that.
  void run(int count, const std::function<void(int)>& job);
  /// Throws InvalidArgument in a thread of this kind, where run() would wait for itself.
  static void refuse_nested();

 private:
  void loop(int replica, int threads_each);
  [[noreturn]] void rethrow(int replica, int count) const;

  std::vector<c10::Device> devices_;  ///< [replica]
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  const std::function<void(int)>* job_ = nullptr;
  const at::ThreadLocalState* state_ = nullptr;
  std::vector<bool> wanted_;                ///< This run's job is still to be begun. [replica]
  std::vector<std::exception_ptr> errors_;  ///< Of this run. [replica]
  int running_ = 0;
  bool end_ = false;
  std::vector<std::thread> threads_;  ///< [replica]
};

}  // namespace ddpkit
