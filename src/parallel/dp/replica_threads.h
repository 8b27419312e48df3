// Tier 1: c10/core/Device.h. The threads of DataParallel, one per replica, kept between calls.
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
  /// `threads_each`: number of intra-op threads for operators on these threads.
  ReplicaThreads(std::vector<c10::Device> devices, int threads_each);
  /// Must not be called from one of these threads.
  ~ReplicaThreads();
  ReplicaThreads(const ReplicaThreads&) = delete;
  ReplicaThreads& operator=(const ReplicaThreads&) = delete;

  /// Calls job(replica) in the threads of the first `count` replicas, with the caller's grad mode, autocast and other
  /// thread-local state. Returns when all jobs have ended. One run at a time. Throws the error of the first failed
  /// replica as an Error that names the replica, with the original exception nested.
  void run(int count, const std::function<void(int)>& job);
  /// Throws InvalidArgument in one of these threads, because run() would deadlock.
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
  std::vector<bool> wanted_;                ///< The job of this run has not started. [replica]
  std::vector<std::exception_ptr> errors_;  ///< Of this run. [replica]
  int running_ = 0;
  bool end_ = false;
  std::vector<std::thread> threads_;  ///< [replica]
};

}  // namespace ddpkit
