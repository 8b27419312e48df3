#include "limit.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "collective.h"

// The compiler vectorizes the loop once per instruction set. The loader selects one when the program starts, before the
// sanitizers are initialized.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define DDPKIT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DDPKIT_CLONES
#endif

namespace ddpkit::bench {
namespace {

/// Memory that processes can share: an unlinked file in memory, in huge pages if the system provides them.
class SharedBuffer {
 public:
  explicit SharedBuffer(std::size_t bytes) : bytes_(bytes) {
    const int fd = ::memfd_create("ddpkit-bench-limit", MFD_CLOEXEC);
    const bool sized = fd >= 0 && ::ftruncate(fd, static_cast<off_t>(bytes)) == 0;
    void* at = sized ? ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    const int error = errno;
    if (fd >= 0) ::close(fd);
    if (at == MAP_FAILED) throw Error(fmt::format("no {} bytes of shared memory: {}", bytes, std::strerror(error)));
    ::madvise(at, bytes, MADV_HUGEPAGE);
    at_ = static_cast<float*>(at);
  }
  ~SharedBuffer() { ::munmap(at_, bytes_); }
  SharedBuffer(const SharedBuffer&) = delete;
  SharedBuffer& operator=(const SharedBuffer&) = delete;
  float* data() const { return at_; }

 private:
  std::size_t bytes_;
  float* at_ = nullptr;
};

class ThreadPeers : public Peers {
 public:
  struct Shared {
    explicit Shared(int ranks) : barrier(ranks) {}
    std::barrier<> barrier;
    std::mutex mutex;
    std::vector<double> values;
  };
  ThreadPeers(Shared& shared, int rank) : shared_(shared), rank_(rank) {}
  void barrier() override { shared_.barrier.arrive_and_wait(); }
  double from_rank_zero(double value) override {
    barrier();  // All threads have read the previous value.
    if (rank_ == 0) shared_.values = {value};
    barrier();
    return shared_.values[0];
  }
  void max_over_ranks(std::vector<double>& values) override {
    barrier();
    if (rank_ == 0) shared_.values.assign(values.size(), 0);
    barrier();
    {
      const std::lock_guard lock(shared_.mutex);
      for (std::size_t i = 0; i < values.size(); ++i) shared_.values[i] = std::max(shared_.values[i], values[i]);
    }
    barrier();
    values = shared_.values;
  }

 private:
  Shared& shared_;
  int rank_;
};

DDPKIT_CLONES void sum_two(float* __restrict a, float* __restrict b, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) a[i] = b[i] = a[i] + b[i];
}

DDPKIT_CLONES void add(float* __restrict sum, const float* __restrict more, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) sum[i] += more[i];
}

}  // namespace

void sum_into_all(float* const* buffers, int count, std::size_t begin, std::size_t end) {
  if (count == 2) return sum_two(buffers[0] + begin, buffers[1] + begin, end - begin);
  constexpr std::size_t kBlock = 1024;  // Fits into the L1 cache.
  float sum[kBlock];
  for (; begin < end; begin += kBlock) {
    const std::size_t numel = std::min(kBlock, end - begin);
    std::copy_n(buffers[0] + begin, numel, sum);
    for (int rank = 1; rank < count; ++rank) add(sum, buffers[rank] + begin, numel);
    for (int rank = 0; rank < count; ++rank) std::copy_n(sum, numel, buffers[rank] + begin);
  }
}

void measure_limit(int ranks, const Plan& plan, const std::function<void(const Row&)>& on_row) {
  const Collective& all_reduce = find_collective("all_reduce");
  const std::vector<std::uint64_t> sizes = plan.sizes();
  std::vector<float*> buffers(static_cast<std::size_t>(ranks));
  std::vector<std::unique_ptr<SharedBuffer>> memory;
  for (int rank = 0; rank < ranks; ++rank) {
    memory.push_back(std::make_unique<SharedBuffer>(exact_bytes(all_reduce, sizes.back(), ranks)));
    buffers[static_cast<std::size_t>(rank)] = memory.back()->data();
  }
  // More threads than cores do not raise the bandwidth.
  const int workers = std::min(ranks, usable_cores());
  ThreadPeers::Shared shared(workers);
  std::atomic<std::uint64_t> wrong = 0;

  const auto run = [&](int worker) {
    if (!plan.no_pin) pin_to_core(worker, workers);
    ThreadPeers peers(shared, worker);
    const auto for_own_ranks = [&](const auto& what) {
      for (int rank = worker; rank < ranks; rank += workers) what(rank, buffers[static_cast<std::size_t>(rank)]);
      peers.barrier();
    };
    for (const std::uint64_t wanted : sizes) {
      const std::uint64_t bytes = exact_bytes(all_reduce, wanted, ranks);
      const std::size_t count = bytes / sizeof(float);
      // Slices begin at cache line boundaries.
      const auto border = [&](int of) {
        return of == workers ? count
                             : count * static_cast<std::size_t>(of) / static_cast<std::size_t>(workers) / 16 * 16;
      };
      const std::size_t begin = border(worker), end = border(worker + 1);
      if (worker == 0) wrong = 0;
      for_own_ranks([&](int rank, float* buffer) { fill_input(rank, buffer, count); });
      sum_into_all(buffers.data(), ranks, begin, end);
      peers.barrier();
      for_own_ranks([&](int rank, const float* buffer) {
        wrong += count_wrong(all_reduce, {rank, ranks, count}, buffer, count);
      });
      for_own_ranks([&](int, float* buffer) { std::fill_n(buffer, count, 0.0f); });
      const double us = median_us(
          peers, [&] { sum_into_all(buffers.data(), ranks, begin, end); }, plan.timing);
      if (worker == 0) on_row({"all_reduce", "limit", ranks, bytes, "symmetric", us, wrong});
      peers.barrier();
    }
  };
  std::vector<std::thread> threads;
  for (int worker = 0; worker < workers; ++worker) threads.emplace_back(run, worker);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace ddpkit::bench
