#include <ddpkit/data/prefetcher.h>

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include <ddpkit/error.h>

namespace ddpkit {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

class PrefetcherBase::Impl {
 public:
  Impl(std::int64_t count, std::function<Made(std::int64_t)> make, const PrefetcherOptions& options)
      : count_(count), make_(std::move(make)), workers_(options.num_workers) {
    if (count < 0 || options.num_workers < 0 || options.prefetch_factor < 1)
      throw InvalidArgument(
          fmt::format("Prefetcher: {} batches, num_workers {} and prefetch_factor {}: at least 0, 0 and 1", count,
                      options.num_workers, options.prefetch_factor));
    ahead_ = std::int64_t{options.num_workers} * options.prefetch_factor;
    threads_.reserve(static_cast<std::size_t>(workers_));
    // at::set_num_threads() is per thread, but the last value is also the initial value of new threads.
    const int before = at::get_num_threads();
    for (int i = 0; i < workers_; ++i) threads_.emplace_back([this] { work(); });
    std::unique_lock lock(mutex_);
    made_.wait(lock, [this] { return started_ == workers_; });
    lock.unlock();
    if (workers_ > 0) at::set_num_threads(before);
  }

  ~Impl() {
    {
      const std::lock_guard lock(mutex_);
      end_ = true;
    }
    wanted_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  Made take() {
    std::unique_lock lock(mutex_);
    if (taken_ == count_) return nullptr;
    const Clock::time_point start = Clock::now();
    if (workers_ == 0) {
      const std::int64_t index = taken_++;
      lock.unlock();
      Made made = make_(index);
      lock.lock();
      stats_.wait_seconds += seconds_since(start);
      stats_.make_seconds = stats_.wait_seconds;
      ++stats_.batches;
      return made;
    }
    made_.wait(lock, [this] { return ready_.contains(taken_); });
    stats_.wait_seconds += seconds_since(start);
    Slot slot = std::move(ready_.extract(taken_++).mapped());
    wanted_.notify_all();
    if (slot.error) std::rethrow_exception(slot.error);
    ++stats_.batches;
    return std::move(slot.made);
  }

  PrefetcherStats stats() const {
    const std::lock_guard lock(mutex_);
    return stats_;
  }

 private:
  struct Slot {
    Made made;
    std::exception_ptr error;
  };

  void work() {
    std::unique_lock lock(mutex_);
    at::get_num_threads();  // The first call in a thread sets its number of threads: call it before setting ours.
    at::set_num_threads(1);
    if (++started_ == workers_) made_.notify_all();
    while (true) {
      wanted_.wait(lock, [this] { return end_ || next_ == count_ || next_ < taken_ + ahead_; });
      if (end_ || next_ == count_) return;
      const std::int64_t index = next_++;
      lock.unlock();
      const Clock::time_point start = Clock::now();
      Slot slot;
      try {
        slot.made = make_(index);
      } catch (...) {
        slot.error = std::current_exception();
      }
      const double seconds = seconds_since(start);
      lock.lock();
      stats_.make_seconds += seconds;
      ready_.emplace(index, std::move(slot));
      if (index == taken_) made_.notify_all();
    }
  }

  const std::int64_t count_;
  const std::function<Made(std::int64_t)> make_;
  const int workers_;
  std::int64_t ahead_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable wanted_, made_;
  std::int64_t next_ = 0;   ///< The first index that no worker has started.
  std::int64_t taken_ = 0;  ///< The next index to return.
  int started_ = 0;
  bool end_ = false;
  std::map<std::int64_t, Slot> ready_;
  PrefetcherStats stats_;
  std::vector<std::thread> threads_;
};

PrefetcherBase::PrefetcherBase(std::int64_t count, std::function<Made(std::int64_t)> make,
                               const PrefetcherOptions& options)
    : impl_(std::make_unique<Impl>(count, std::move(make), options)) {}
PrefetcherBase::~PrefetcherBase() = default;
PrefetcherBase::PrefetcherBase(PrefetcherBase&&) noexcept = default;
PrefetcherBase& PrefetcherBase::operator=(PrefetcherBase&&) noexcept = default;
std::int64_t PrefetcherBase::batches_of(std::size_t samples, std::size_t batch_size) {
  if (batch_size == 0) throw InvalidArgument("Prefetcher: batch_size is 0; use at least 1");
  return static_cast<std::int64_t>((samples + batch_size - 1) / batch_size);
}
PrefetcherBase::Made PrefetcherBase::take() { return impl_->take(); }
PrefetcherStats PrefetcherBase::stats() const { return impl_->stats(); }

}  // namespace ddpkit
