// Shared memory of the ranks: the rendezvous, and symmetric segments.
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/shm/engine.h"
#include "comm/shm/operation.h"

namespace ddpkit::shm {

void Engine::join() {
  // The control memory and its layout exist. Each rank fills in its block.
  slots_.resize(static_cast<std::size_t>(world_size_));
  for (int r = 0; r < world_size_; ++r) watches_.emplace_back(pid(r));
  Mapping& own = slots_[static_cast<std::size_t>(rank_)];
  own = Mapping::create(fmt::format("staging-{}", rank_), kSlots * kSlotBytes);
  RankBlock& self = block(rank_);
  channels_.resize(static_cast<std::size_t>(world_size_));
  const std::size_t channel_bytes = sizeof(ChannelBlock) * static_cast<std::size_t>(world_size_);
  Mapping& own_channels = channels_[static_cast<std::size_t>(rank_)];
  own_channels = Mapping::create(fmt::format("channels-{}", rank_), channel_bytes, Mapping::Fill::kOnTouch);
  self.channels_fd = own_channels.descriptor();
  self.stack_signal = recorder_.stack_signal();
  self.staging_fd = own.descriptor();
  cpu_set_t cores;
  CPU_ZERO(&cores);
  ::sched_getaffinity(0, sizeof cores, &cores);
  std::memcpy(self.cores.data(), &cores, std::min(sizeof cores, sizeof self.cores));
  self.joined.store(1);

  const auto deadline = Clock::now() + timeout_;
  const auto wait_for_all = [&](std::uint32_t step) {
    for (int r = 0; r < world_size_; ++r) {
      while (block(r).joined.load() < step) {
        throw_announced_failure(r);
        if (!watches_[static_cast<std::size_t>(r)].alive() && block(r).joined.load() < step) {
          throw_announced_failure(r);  // The rank may have announced a failure between the two checks.
          throw PeerLost(fmt::format("rank {} (pid {}) ended while the ranks were meeting", named(r), pid(r)),
                         {.rank = named(r), .call = "rendezvous"});
        }
        if (Clock::now() > deadline)
          throw Timeout(
              fmt::format("rank {} timed out: rank {} did not join the shm group of {} ranks within {:.1f} s",
                          named(rank_), named(r), world_size_, std::chrono::duration<double>(timeout_).count()),
              {.rank = named(r), .call = "rendezvous"});
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    }
  };
  wait_for_all(1);
  cpu_set_t all;
  CPU_ZERO(&all);
  std::vector<ChannelBlock*> channels;
  for (int r = 0; r < world_size_; ++r) {
    const auto index = static_cast<std::size_t>(r);
    if (r != rank_) {
      slots_[index] = open(r, block(r).staging_fd, kSlots * kSlotBytes, Mapping::Fill::kNow);
      channels_[index] = open(r, block(r).channels_fd, channel_bytes, Mapping::Fill::kOnTouch);
    }
    // New pages are zero: the initial state of a channel.
    channels.push_back(reinterpret_cast<ChannelBlock*>(channels_[index].data()));
    staging_.slots.push_back(slots_[index].data());
    cpu_set_t theirs;
    CPU_ZERO(&theirs);
    std::memcpy(&theirs, block(r).cores.data(), std::min(sizeof theirs, sizeof self.cores));
    CPU_OR(&all, &all, &theirs);
  }
  core_each_ = CPU_COUNT(&all) >= world_size_;
  self.joined.store(2);
  wait_for_all(2);
  staging_.rank = rank_;
  staging_.parts.resize(staging_.slots.size());
  own.close_descriptor();
  own_channels.close_descriptor();
  mailbox_ = std::make_unique<Mailbox>(rank_, std::move(channels));
}

Mapping Engine::open(int rank, int fd, std::size_t bytes, Mapping::Fill fill) const {
  try {
    return Mapping::open({.rank = named(rank), .pid = pid(rank)}, fd, bytes, fill);
  } catch (const Error&) {
    throw_announced_failure(rank);  // A rank that fails announces the failure before it closes its memory.
    throw;
  }
}

std::shared_ptr<SymmetricSegment> Engine::allocate(std::size_t bytes, Mapping::Fill fill) {
  const auto ranks = static_cast<std::size_t>(world_size_);
  const auto gather = [&](const SegmentOffer& offer) {
    std::vector<SegmentOffer> offers(ranks);
    Request request{.kind = CollectiveKind::kAllGather, .input = &offer, .numel = sizeof(SegmentOffer)};
    for (SegmentOffer& theirs : offers) request.outputs.push_back(&theirs);
    wait(post(std::move(request)));
    return offers;
  };
  const auto throw_first_error = [this](const std::vector<SegmentOffer>& offers) {
    for (std::size_t r = 0; r < offers.size(); ++r) {
      if (offers[r].error[0])
        throw Error(fmt::format("rank {}: {}", named(static_cast<int>(r)), offers[r].error),
                    {.rank = named(static_cast<int>(r)), .call = "allocate"});
    }
  };

  SegmentOffer own{.bytes = bytes};
  const auto note_error = [&own](const std::exception& error) {
    fmt::format_to_n(own.error, sizeof own.error - 1, "{}", error.what());
  };
  auto segment = std::make_shared<SymmetricSegment>();
  segment->bytes = bytes;
  segment->mappings.resize(ranks);
  Mapping& mapping = segment->mappings[static_cast<std::size_t>(rank_)];
  try {
    mapping = Mapping::create(fmt::format("segment-{}", rank_), bytes, fill);
    own.fd = mapping.descriptor();
  } catch (const Error& error) {
    note_error(error);
  }
  const auto offers = gather(own);
  for (int r = 0; r < world_size_; ++r) {
    if (offers[static_cast<std::size_t>(r)].bytes != bytes) {
      const std::unique_lock lock(mutex_);
      fail(FailureKind::kMismatch,
           fmt::format("allocate: rank {} asked for {} bytes of symmetric memory, rank {} for {}", named(0),
                       offers[0].bytes, named(r == 0 ? rank_ : r),
                       r == 0 ? bytes : offers[static_cast<std::size_t>(r)].bytes),
           named(r));
    }
  }
  throw_first_error(offers);
  try {
    for (int r = 0; r < world_size_; ++r) {
      const auto index = static_cast<std::size_t>(r);
      if (r != rank_) segment->mappings[index] = open(r, offers[index].fd, bytes, fill);
      segment->base.push_back(segment->mappings[index].data());
    }
  } catch (const PeerLost& error) {
    // The rank may have taken part in the next exchange before it ended, so the group must fail.
    const std::unique_lock lock(mutex_);
    fail(FailureKind::kPeerLost, error.what(), error.context().rank);
  } catch (const Error& error) {
    note_error(error);
  }
  throw_first_error(gather(own));  // Also keeps the descriptor open until all ranks have mapped it.
  mapping.close_descriptor();
  const std::unique_lock lock(mutex_);
  segment->id = next_segment_++;
  std::erase_if(segments_, [](const auto& old) { return old.expired(); });
  segments_.push_back(segment);
  return segment;
}

}  // namespace ddpkit::shm
