#include "comm/guard.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <ddpkit/error.h>

#include "comm/roll_call.h"
#include "comm/timeout.h"
#include "comm/trace/event_ring.h"

namespace ddpkit {
namespace {

/// Interval of look(), while calls are in progress and otherwise.
constexpr std::chrono::milliseconds kLook(20), kIdleLook(100);
/// How long rank 0 waits for answers about a late call, and the other ranks wait for rank 0.
constexpr std::chrono::milliseconds kAnswerLimit(300), kVerdictLimit(1000);
/// A backend may report a lost connection before the guard detects the end of the rank.
constexpr std::chrono::milliseconds kErrorDelay(200);

}  // namespace

GroupGuard::GroupGuard(const c10::intrusive_ptr<c10d::Store>& store, const LaunchEnvironment& environment,
                       std::chrono::milliseconds timeout, int name)
    : name_(name),
      ranks_(environment.world_size),
      timeout_(clamp_timeout(timeout)),
      leads_(environment.rank == 0),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (wake_ < 0) throw Error(fmt::format("no eventfd for a process group: {}", std::strerror(errno)));
  if (ranks_ == 1) return;
  RollCall roll_call(store, "guard", environment.rank, ranks_, timeout);
  try {
    const std::string offer = roll_call.exchange(leads_ ? listen(environment) : "").front();
    if (!leads_) connect(offer);
  } catch (const Error& error) {
    roll_call.announce(error);
    stop();
    throw;
  }
}

GroupGuard::~GroupGuard() { stop(); }

void GroupGuard::start(Actions actions) {
  actions_ = std::move(actions);
  thread_ = std::thread([this] { run(); });
}

void GroupGuard::fail_if_unwinding() noexcept {
  if (std::uncaught_exceptions() > exceptions_) abort("an exception ended its use of the group");
}

std::string GroupGuard::end(std::chrono::milliseconds limit) {
  fail_if_unwinding();
  // Rank 0 knows which ranks are missing, so its verdict comes first.
  const auto deadline = Clock::now() + limit + (leads_ ? std::chrono::milliseconds(0) : kAnswerLimit);
  const bool is_idle_now = is_idle(limit);
  if (is_idle_now && ranks_ > 1) {
    ends_ = true;
    if (!leads_) send_to_all("end\n");
    wake();
    poll_until(deadline, [this] { return all_end_ || failed_ || has_lost_peer(); });
  }
  const std::lock_guard lock(mutex_);
  if (failed_) return failure_.text;
  if (is_idle_now && (ranks_ == 1 || all_end_)) return {};
  if (!is_idle_now) return fmt::format("rank {} {}", name_, calls_.state());
  std::vector<int> missing;
  for (const Peer& peer : peers_) {
    if (leads_ && !peer.ends) missing.push_back(peer.name);
  }
  return fmt::format("{} did not come within {:.1f} s",
                     missing.empty() ? "another rank" : fmt::format("rank {}", fmt::join(missing, ", ")),
                     std::chrono::duration<double>(limit).count());
}

bool GroupGuard::has_lost_peer() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(peers_, [](const Peer& peer) { return peer.name >= 0 && peer.fd < 0 && !peer.ends; });
}

void GroupGuard::stop() noexcept {
  stops_ = true;
  wake();
  if (thread_.joinable()) thread_.join();
  // The thread may not have seen all ranks. Without a line, they would take the end of their connection for a failure.
  while (accept()) {
  }
  for (Peer& peer : peers_) {
    if (peer.fd >= 0 && peer.name < 0) static_cast<void>(read(peer));
  }
  fail_if_unwinding();
  send_to_all(fmt::format("bye {}\n", calls_.count()));
  for (const Peer& peer : peers_) {
    if (peer.fd >= 0) ::close(peer.fd);
  }
  peers_.clear();
  for (int* fd : {&listener_, &wake_}) {
    if (*fd >= 0) ::close(std::exchange(*fd, -1));
  }
}

void GroupGuard::wake() noexcept {
  const std::uint64_t one = 1;
  static_cast<void>(!::write(wake_, &one, sizeof one));
}

void GroupGuard::run() {
  bool soon = false, aborted = false;
  std::vector<pollfd> descriptors;
  while (!stops_) {
    descriptors = {{wake_, POLLIN, 0}, {listener_, POLLIN, 0}};  // A negative descriptor is never ready.
    for (const Peer& peer : peers_) descriptors.push_back({peer.fd, POLLIN, 0});
    const auto limit = soon ? kLook : kIdleLook;
    ::poll(descriptors.data(), descriptors.size(), static_cast<int>(limit.count()));
    std::uint64_t count = 0;
    static_cast<void>(!::read(wake_, &count, sizeof count));
    if (stops_) return;
    for (std::size_t i = 2; i < descriptors.size(); ++i) {
      Peer& peer = peers_[i - 2];
      if (descriptors[i].revents != 0 && !read(peer)) disconnect(peer);
    }
    if (descriptors[1].revents != 0) accept();
    soon = look();
    if (failed_ && !std::exchange(aborted, true)) actions_.abort();
  }
}

void GroupGuard::watch(std::uint64_t index, const Event& event, std::function<bool()> has_ended) {
  if (calls_.add(index, event, std::move(has_ended))) wake();
}

void GroupGuard::note_end(std::uint64_t index) { calls_.note_end(index); }

bool GroupGuard::is_idle(std::chrono::milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  const bool has_failed = failed_;  // After a failure, the guard itself waits here.
  bool is_idle = false;
  poll_until(deadline, [&] { return (is_idle = !calls_.look()) || failed_ != has_failed; });
  return is_idle;
}

bool GroupGuard::look() {
  const bool is_busy = calls_.look();
  if (failed_) return false;
  look_for_ended_peers();
  if (leads_ && ends_ && !all_end_) look_for_end();
  look_for_left_peers();
  look_for_error(is_busy);
  if (late_) judge();
  if (!late_ && ranks_ > 1) {
    if (const auto late = calls_.late(timeout_)) {
      const std::string text = fmt::format("rank {} timed out after {:.1f} s in {}", name_,
                                           std::chrono::duration<double>(timeout_).count(), late->text);
      if (late->number && !peers_.empty()) {
        ask({.name = name_, .number = *late->number, .kind = late->kind, .text = text});
      } else {
        fail({.kind = FailureKind::kTimeout, .text = text});
      }
    }
  }
  return is_busy || late_;
}

void GroupGuard::look_for_end() {
  if (std::ranges::count_if(peers_, &Peer::ends) != ranks_ - 1) return;
  send_to_all("end\n");
  all_end_ = true;
}

void GroupGuard::look_for_ended_peers() {
  for (Peer& peer : peers_) {
    if (peer.fd < 0 || !peer.process || peer.process->alive()) continue;
    if (read(peer)) fail_as_ended(peer);  // Unless its last line was "bye".
    disconnect(peer);
  }
}

void GroupGuard::look_for_left_peers() {
  for (const Peer& peer : peers_) {
    if (peer.calls && calls_.count() > *peer.calls)
      fail(
          {FailureKind::kPeerLost, peer.name,
           fmt::format("rank {} (pid {}) has left the group; rank {} {}", peer.name, peer.pid, name_, calls_.state())});
  }
}

void GroupGuard::look_for_error(bool is_busy) {
  if (error_.empty()) {
    error_ = calls_.error();
    if (error_.empty() && is_busy) error_ = actions_.error();
    error_since_ = Clock::now();
  }
  if (!error_.empty() && Clock::now() - error_since_ > kErrorDelay) abort(error_);
}

/// On rank 0: asks all ranks about a late call. On another rank: asks rank 0 to do so.
void GroupGuard::ask(LateCall late) {
  if (late_) return;
  late_ = std::move(late);
  late_->until = Clock::now() + (leads_ ? kAnswerLimit : kVerdictLimit);
  send_to_all(fmt::format("{} {} {} {} {}\n", leads_ ? "where" : "late", late_->name, late_->number, late_->kind,
                          leads_ ? "" : late_->text));
}

std::string GroupGuard::answer_to(const LateCall& late) const {
  const std::string kind = calls_.kind_of(late.number);
  const bool has_called = calls_.count() > late.number && (kind == "-" || kind == late.kind);
  return has_called ? "" : calls_.state();
}

void GroupGuard::judge() {
  const bool is_late = Clock::now() > late_->until;
  const bool has_all =
      leads_ && std::ranges::all_of(peers_, [](const Peer& peer) { return peer.answer || peer.fd < 0; });
  if (!is_late && !has_all) return;
  std::vector<std::pair<int, std::string>> awaited;
  const auto add = [&](int name, const std::string& state) {
    if (!state.empty() && name != late_->name) awaited.emplace_back(name, state);
  };
  if (leads_) add(name_, answer_to(*late_));
  for (const Peer& peer : peers_) {
    if (peer.fd >= 0) add(peer.name, peer.answer.value_or("does not answer"));
  }
  std::string text = late_->text + (awaited.empty() ? "; all ranks have called it" : ", waiting for ");
  for (std::size_t i = 0; i < awaited.size(); ++i)
    text += fmt::format("{}rank {}, which {}", i == 0 ? "" : "; ", awaited[i].first, awaited[i].second);
  fail({FailureKind::kTimeout, awaited.size() == 1 ? awaited[0].first : -1, text});
  late_.reset();
}

bool GroupGuard::note(const Failure& failure) noexcept {
  const std::lock_guard lock(mutex_);
  if (failed_) return false;
  failure_ = failure;
  failed_ = true;
  return true;
}

void GroupGuard::fail(const Failure& failure) noexcept {
  Failure shown = failure;
  shown.text.resize(std::min(shown.text.size(), kMostText));
  std::ranges::replace(shown.text, '\n', ' ');
  if (!note(shown)) return;
  send_to_all(shown.line());
  wake();
}

void GroupGuard::abort(const std::string& reason) noexcept {
  fail({FailureKind::kAborted, name_, fmt::format("rank {} aborted: {}", name_, reason)});
}

void GroupGuard::throw_failure(std::chrono::milliseconds patience) const {
  const auto deadline = Clock::now() + patience;
  if (!poll_until(deadline, [this] { return failed_.load(); })) return;
  const std::lock_guard lock(mutex_);
  const std::optional<int> failed_rank = failure_.failed_rank < 0 ? std::nullopt : std::optional(failure_.failed_rank);
  EventRing& ring = EventRing::of_process();
  ring.fail(failure_.kind, ring.is_world(group_) ? failed_rank : std::nullopt);
  const Error::Context context{.rank = failed_rank, .call = "collective"};
  if (failure_.kind == FailureKind::kTimeout) throw Timeout(failure_.text, context);
  throw PeerLost(failure_.text, context);
}

}  // namespace ddpkit
