#include "comm/roll_call.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <ddpkit/error.h>

#include "comm/host.h"

namespace ddpkit {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

void WaitReport::write_if_late(const std::function<std::string()>& text) {
  if (Clock::now() < at_) return;
  next_ = std::min(2 * next_, std::chrono::seconds(60));
  at_ = Clock::now() + next_;
  const std::string line = fmt::format("[ddpkit] {}\n", text());
  std::fwrite(line.data(), 1, line.size(), stderr);
}

RollCall::RollCall(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank, int world_size,
                   std::chrono::milliseconds timeout, int first_rank, std::string hint)
    : store_(std::move(store)),
      name_(std::move(name)),
      rank_(rank),
      world_size_(world_size),
      timeout_(timeout),
      first_rank_(first_rank),
      hint_(std::move(hint)) {}

std::string RollCall::key(int rank) const { return fmt::format("{}/{}", name_, rank); }

std::string RollCall::key_of_complete() const { return fmt::format("{}/complete/{}", name_, rank_); }

std::vector<int> RollCall::missing() const {
  std::vector<int> ranks;
  for (int r = 0; r < world_size_; ++r) {
    if (!store_->check({key(r)})) ranks.push_back(first_rank_ + r);
  }
  return ranks;
}

void RollCall::come(const std::string& text) {
  try {
    store_->set(key(rank_), bytes_of(text));
  } catch (const c10::Error& error) {
    throw_lost_store(error);
  }
}

void RollCall::wait_for_all(const std::string& text) {
  const auto text_of_missing = [&](const std::vector<int>& ranks) {
    return fmt::format("rank{} {} of {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "), world_size_);
  };
  std::vector<std::string> keys;
  for (int r = 0; r < world_size_; ++r) keys.push_back(key(r));
  try {
    come(text);
    const auto start = Clock::now();
    WaitReport report;
    auto nap = std::chrono::microseconds(200);
    // Polls, because c10d logs a warning for every wait that times out.
    while (!store_->check(keys)) {
      throw_if_announced();
      if (Clock::now() - start > timeout_) {
        const std::vector<int> ranks = missing();
        if (ranks.empty()) break;
        throw RendezvousError(fmt::format("the rendezvous timed out: {} did not come within {:.1f} s",
                                          text_of_missing(ranks), std::chrono::duration<double>(timeout_).count()),
                              {.rank = ranks.front(), .call = "rendezvous"});
      }
      if (rank_ == 0)
        report.write_if_late([&] {
          return fmt::format("rank {} has waited {:.0f} s for {}{}", first_rank_,
                             std::chrono::duration<double>(Clock::now() - start).count(), text_of_missing(missing()),
                             hint_);
        });
      std::this_thread::sleep_for(nap);
      nap = std::min(nap * 2, std::chrono::microseconds(20000));
    }
  } catch (const c10::Error& error) {
    throw_lost_store(error);
  }
}

void RollCall::throw_lost_store(const c10::Error& error) const {
  throw RendezvousError(fmt::format("rank {} lost the connection to the store during the rendezvous: {}",
                                    first_rank_ + rank_, error.what_without_backtrace()),
                        {.rank = 0, .call = "rendezvous"});
}

std::vector<std::string> RollCall::exchange(const std::string& text) {
  wait_for_all(text);
  std::vector<std::string> texts;
  try {
    for (int r = 0; r < world_size_; ++r) texts.push_back(text_of(store_->get(key(r))));
  } catch (const c10::Error& error) {
    throw_lost_store(error);
  }
  return texts;
}

void RollCall::throw_if_announced() const {
  std::string announced;
  try {
    const std::string failed = fmt::format("{}/failed", name_);
    if (!store_->check({failed})) return;
    announced = text_of(store_->get(failed));
  } catch (const c10::Error&) {
    return;  // The store has ended.
  }
  int reporter = -1, failed = -1, length = 0;
  if (std::sscanf(announced.c_str(), "%d %d %n", &reporter, &failed, &length) != 2) return;
  if (reporter == first_rank_ + rank_) return;  // From an earlier attempt of this rank.
  throw RendezvousError(announced.substr(static_cast<std::size_t>(length)), {.rank = failed, .call = "rendezvous"});
}

void RollCall::announce(const Error& error) const noexcept {
  try {
    const int own = first_rank_ + rank_, failed = error.context().rank.value_or(own);
    const std::string text =
        fmt::format("{}{}", failed == own ? fmt::format("rank {} aborted: ", own) : "", error.what());
    store_->compareSet(fmt::format("{}/failed", name_), {}, bytes_of(fmt::format("{} {} {}", own, failed, text)));
  } catch (const std::exception&) {
    // Without the store, the others do not wait.
  }
}

void RollCall::require_first() const {
  try {
    if (!store_->check({key_of_complete()})) return;
  } catch (const c10::Error& error) {
    throw_lost_store(error);
  }
  throw InvalidArgument(
      fmt::format("rank {} has already joined a group through this store: pass each group a c10d::PrefixStore with "
                  "another prefix",
                  first_rank_ + rank_));
}

void RollCall::complete() const noexcept {
  try {
    store_->set(key_of_complete(), bytes_of("yes"));
  } catch (const std::exception&) {
    // The store has ended, so no other rendezvous uses it.
  }
}

std::string alone_hint(const LaunchEnvironment& environment) {
  if (environment.launcher != "torchrun" || environment.run_id != "none/0") return {};
  return fmt::format(
      "; RANK={} and WORLD_SIZE={} come from the environment: to train in this process alone, unset RANK WORLD_SIZE",
      environment.rank, environment.world_size);
}

namespace {

std::string presence_key(int rank) { return fmt::format("present/{}", rank); }
std::string this_host() { return fmt::format("{}/{} ", boot_id(), namespace_number("pid")); }

/// Returns the process on this host that has registered as `rank`, if it still runs and is not this process.
std::optional<int> process_of_rank(c10d::Store& store, int rank) {
  if (!store.check({presence_key(rank)})) return std::nullopt;
  const std::string presence = text_of(store.get(presence_key(rank))), host = this_host();
  if (!presence.starts_with(host)) return std::nullopt;
  const int pid = std::atoi(presence.c_str() + host.size());
  const bool runs = pid > 0 && pid != ::getpid() && (::kill(pid, 0) == 0 || errno == EPERM);
  return runs ? std::optional(pid) : std::nullopt;
}

}  // namespace

void wait_for_ranks(const c10::intrusive_ptr<c10d::Store>& store, const LaunchEnvironment& environment,
                    std::chrono::milliseconds timeout) {
  const std::string own = this_host() + std::to_string(::getpid());
  store->compareSet(presence_key(environment.rank), {}, bytes_of(own));
  if (const auto other = process_of_rank(*store, environment.rank))
    throw RendezvousError(
        fmt::format("two processes have rank {}: process {} and this one ({}); give each of the {} processes its own "
                    "RANK",
                    environment.rank, *other, ::getpid(), environment.world_size),
        {.rank = environment.rank, .call = "rendezvous"});
  RollCall(store, "present", environment.rank, environment.world_size, timeout, 0, alone_hint(environment))
      .wait_for_all(own);
}

void find_place_on_host(c10d::Store& store, LaunchEnvironment& environment) {
  const auto key = [](int rank) { return fmt::format("host-{}", rank); };
  const std::string own = fmt::format("{}/{}", boot_id(), namespace_number("net"));
  store.set(key(environment.rank), std::vector<std::uint8_t>(own.begin(), own.end()));
  environment.local_rank = environment.local_world_size = 0;
  for (int rank = 0; rank < environment.world_size; ++rank) {
    std::vector<std::uint8_t> host;
    try {
      host = store.get(key(rank));
    } catch (const c10::Error& error) {
      throw RendezvousError(fmt::format("rank {} of a subset of {} did not call split(): {}", rank,
                                        environment.world_size, error.what_without_backtrace()),
                            {.rank = rank, .call = "split"});
    }
    if (std::string(host.begin(), host.end()) != own) continue;
    if (rank < environment.rank) ++environment.local_rank;
    ++environment.local_world_size;
  }
}

}  // namespace ddpkit
