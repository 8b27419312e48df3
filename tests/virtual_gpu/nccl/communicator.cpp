#include "virtual_gpu/nccl/communicator.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <thread>

namespace vgpu::nccl {
namespace {

constexpr std::size_t kSlotsAt = (sizeof(Segment) + 4095) / 4096 * 4096;

void* map_shared(const std::string& name, std::size_t size) {
  const int file = ::shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(size)) != 0) throw std::runtime_error("no shared memory");
  void* mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  if (mapped == MAP_FAILED) throw std::runtime_error("no shared memory");
  return mapped;
}

}  // namespace

void Backoff::pause() {
  constexpr int kYields = 2000;
  if (pauses_ < kYields) {
    ++pauses_;
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

Communicator::Communicator(const std::string& name, int ranks, int rank)
    : rank_(rank), ranks_(ranks), device_(current_device()), name_(name) {
  if (ranks > kMaxRanks) throw std::runtime_error("too many ranks");
  const auto count = static_cast<std::size_t>(ranks);
  size_ = kSlotsAt + count * kSlotBytes + count * count * sizeof(Mail);
  auto* bytes = static_cast<char*>(map_shared(name, size_));
  segment_ = reinterpret_cast<Segment*>(bytes);
  slots_ = bytes + kSlotsAt;
  mails_ = reinterpret_cast<Mail*>(slots_ + count * kSlotBytes);
  run_fault(kInit.data());
  if (++segment_->joined == ranks) ::shm_unlink(name.c_str());
}

Communicator::~Communicator() { ::munmap(segment_, size_); }

bool Communicator::barrier(std::atomic<std::uint64_t> RankPage::*arrived, std::uint64_t& generation) {
  const std::uint64_t mine = ++generation;
  (page(rank_).*arrived).store(mine, std::memory_order_release);
  for (int rank = 0; rank < ranks_; ++rank) {
    Backoff backoff;
    while ((page(rank).*arrived).load(std::memory_order_acquire) < mine) {
      if (aborted_ || devices_are_lost()) return false;
      backoff.pause();
    }
  }
  return !aborted_;
}

std::shared_ptr<void> Communicator::work_of(const std::shared_ptr<Communicator>& communicator, bool captured) {
  std::atomic<int>& count = captured ? communicator->captured_ : communicator->queued_;
  ++count;
  return {nullptr, [communicator, &count](void*) { --count; }};
}

void Communicator::finalize() {
  Backoff backoff;
  while ((queued_ > 0 || captured_ > 0) && !aborted_ && !devices_are_lost()) backoff.pause();
}

void Communicator::abort() {
  aborted_ = true;
  Backoff backoff;
  while (captured_ > 0 && !devices_are_lost()) backoff.pause();
}

}  // namespace vgpu::nccl
