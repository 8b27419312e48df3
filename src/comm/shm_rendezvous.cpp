// How the ranks of a group find each other's memory.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <new>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <ddpkit/comm/error.h>
#include <ddpkit/comm/shm_backend.h>

#include "comm/host.h"
#include "comm/shm_backend.h"
#include "comm/timeout.h"

namespace ddpkit {
namespace {

/// Reads the same on every rank of one host, container and user, and differs otherwise.
std::string host_identity() { return fmt::format("{}/{}/{}", boot_id(), namespace_number("pid"), ::geteuid()); }

std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

/// Every rank's `text`; names those that did not come. [rank]
std::vector<std::string> exchange(c10d::Store& store, int rank, int world_size, const std::string& text,
                                  std::chrono::milliseconds timeout) {
  const auto key = [](int r) { return fmt::format("shm/{}", r); };
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::vector<std::string> texts;
  try {
    store.set(key(rank), bytes_of(text));
    auto nap = std::chrono::microseconds(200);
    while (texts.size() < static_cast<std::size_t>(world_size)) {
      const int next = static_cast<int>(texts.size());
      // Asked for rather than waited for: c10d logs a warning about every wait that ends without an answer.
      if (store.check({key(next)})) {
        const auto value = store.get(key(next));
        texts.emplace_back(value.begin(), value.end());
        continue;
      }
      if (std::chrono::steady_clock::now() > deadline) {
        std::vector<int> missing;
        for (int r = next; r < world_size; ++r) {
          if (!store.check({key(r)})) missing.push_back(r);
        }
        throw RendezvousError(
            fmt::format("rank{} {} of {} did not come within {:.1f} s", missing.size() == 1 ? "" : "s",
                        fmt::join(missing, ", "), world_size, std::chrono::duration<double>(timeout).count()),
            {.rank = missing.empty() ? -1 : missing.front(), .call = "rendezvous"});
      }
      std::this_thread::sleep_for(nap);
      nap = std::min(nap * 2, std::chrono::microseconds(20000));
    }
  } catch (const c10::Error& error) {
    throw RendezvousError(fmt::format("rank {} lost the store of rank 0 while the ranks were meeting: {}", rank,
                                      error.what_without_backtrace()),
                          {.rank = 0, .call = "rendezvous"});
  }
  return texts;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> create_shm_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                     int world_size, std::chrono::milliseconds timeout) {
  if (world_size < 1 || rank < 0 || rank >= world_size)
    throw InvalidArgument(fmt::format("there is no rank {} in a world of {}", rank, world_size));
  if (timeout.count() <= 0)
    throw InvalidArgument(fmt::format("the timeout is {} ms, but must be positive", timeout.count()));
  timeout = bounded(timeout);
  shm::Mapping control;
  std::vector<int> pids{::getpid()};
  std::string offer = fmt::format("{} {}", host_identity(), ::getpid());
  if (rank == 0) {
    control = shm::Mapping::create("control", shm::control_bytes(world_size));
    auto* head = new (control.data()) shm::ControlHead{shm::kLayout, static_cast<std::uint32_t>(world_size)};
    auto* blocks = reinterpret_cast<shm::RankBlock*>(control.data() + sizeof *head);
    for (int r = 0; r < world_size; ++r) new (blocks + r) shm::RankBlock;
    offer += fmt::format(" {}", control.descriptor());
  }
  if (world_size > 1) {
    const auto offers = exchange(*store, rank, world_size, offer, timeout);
    const std::string host = offers[0].substr(0, offers[0].find(' '));
    pids.resize(static_cast<std::size_t>(world_size));
    int fd = -1;
    for (int r = 0; r < world_size; ++r) {
      const auto index = static_cast<std::size_t>(r);
      if (offers[index].substr(0, offers[index].find(' ')) != host)
        throw RendezvousError(
            fmt::format("the shm backend is for ranks of one host, container and user, but rank {} is not where rank 0 "
                        "is: use --backend gloo, or set LOCAL_WORLD_SIZE to the ranks a host",
                        r),
            {.rank = r, .call = "rendezvous"});
      const int expected = r == 0 ? 2 : 1;
      if (std::sscanf(offers[index].c_str() + host.size(), " %d %d", &pids[index], &fd) != expected)
        throw RendezvousError(fmt::format("rank {} runs another version of ddpkit", r), {.rank = r});
    }
    if (rank != 0) {
      control = shm::Mapping::open({.rank = 0, .pid = pids[0]}, fd, shm::control_bytes(world_size));
      const auto* head = reinterpret_cast<const shm::ControlHead*>(control.data());
      if (head->layout != shm::kLayout || head->world_size != static_cast<std::uint32_t>(world_size))
        throw RendezvousError("rank 0 runs another version of ddpkit, or another world size", {.rank = 0});
    }
  }
  return c10::make_intrusive<ShmBackend>(std::make_shared<shm::Engine>(std::move(control), rank, pids, timeout),
                                         timeout);
}

}  // namespace ddpkit
