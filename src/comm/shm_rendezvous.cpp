// The rendezvous of the shm backend: maps the memory of the ranks.
#include <unistd.h>

#include <cstdio>
#include <numeric>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <ddpkit/error.h>

#include "comm/host.h"
#include "comm/roll_call.h"
#include "comm/shm/engine.h"
#include "comm/shm_rendezvous.h"
#include "comm/timeout.h"

namespace ddpkit {
namespace {

/// Is the same for all ranks of one host, container and user, and differs otherwise.
std::string host_identity() { return fmt::format("{}/{}/{}", boot_id(), namespace_number("pid"), ::geteuid()); }

/// Opens the memory that rank 0 has created. Sets `pids`.
shm::Mapping open_control(const std::vector<std::string>& offers, int rank, int first_rank, std::vector<int>& pids,
                          const RollCall& roll_call) {
  const int world_size = static_cast<int>(offers.size());
  const std::string host = offers[0].substr(0, offers[0].find(' '));
  pids.resize(offers.size());
  int fd = -1;
  for (int r = 0; r < world_size; ++r) {
    const auto index = static_cast<std::size_t>(r);
    if (offers[index].substr(0, offers[index].find(' ')) != host)
      throw RendezvousError(
          fmt::format("the shm backend is for ranks of one host, container and user, but rank {} and rank {} do not "
                      "share all three; use the gloo backend, or set LOCAL_WORLD_SIZE to the number of ranks per host",
                      first_rank + r, first_rank),
          {.rank = first_rank + r, .call = "rendezvous"});
    const int expected = r == 0 ? 2 : 1;
    if (std::sscanf(offers[index].c_str() + host.size(), " %d %d", &pids[index], &fd) != expected)
      throw RendezvousError(fmt::format("rank {} runs another version of ddpkit", first_rank + r),
                            {.rank = first_rank + r});
  }
  if (rank == 0) return {};
  shm::Mapping control;
  try {
    control = shm::Mapping::open({.rank = first_rank, .pid = pids[0]}, fd, shm::control_bytes(world_size));
  } catch (const Error&) {
    roll_call.throw_if_announced();  // Rank 0 closes the memory if it fails.
    throw;
  }
  const auto* head = reinterpret_cast<const shm::ControlHead*>(control.data());
  if (head->layout != shm::kLayout || head->world_size != static_cast<std::uint32_t>(world_size))
    throw RendezvousError(fmt::format("rank {} runs another version of ddpkit, or another world size", first_rank),
                          {.rank = first_rank});
  return control;
}

}  // namespace

std::shared_ptr<shm::Engine> connect_engine(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                            std::chrono::milliseconds timeout, int first_rank, std::vector<int> names) {
  if (world_size < 1 || rank < 0 || rank >= world_size)
    throw InvalidArgument(fmt::format("there is no rank {} in a world of {}", rank, world_size));
  if (timeout.count() <= 0)
    throw InvalidArgument(fmt::format("the timeout is {} ms, but must be positive", timeout.count()));
  timeout = clamp_timeout(timeout);
  RollCall roll_call(store, "shm", rank, world_size, timeout, first_rank);
  roll_call.require_first();
  try {
    shm::Mapping control;
    std::vector<int> pids{::getpid()};
    std::string offer = fmt::format("{} {}", host_identity(), ::getpid());
    if (rank == 0) {
      control = shm::create_control(world_size);
      offer += fmt::format(" {}", control.descriptor());
    }
    if (world_size > 1) {
      auto opened = open_control(roll_call.exchange(offer), rank, first_rank, pids, roll_call);
      if (rank != 0) control = std::move(opened);
    }
    if (names.empty()) {
      names.resize(pids.size());
      std::iota(names.begin(), names.end(), first_rank);
    }
    auto engine = share(std::make_unique<shm::Engine>(std::move(control), rank, pids, timeout, std::move(names)));
    roll_call.complete();
    return engine;
  } catch (const Error& error) {
    // Otherwise the other ranks would report the end of this rank as the cause.
    if (world_size > 1) roll_call.announce(error);
    throw;
  }
}

}  // namespace ddpkit
