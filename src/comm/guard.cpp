#include "comm/guard.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <ddpkit/error.h>

#include "comm/roll_call.h"
#include "comm/sockets.h"
#include "comm/timeout.h"
#include "comm/trace/event_ring.h"

namespace ddpkit {
namespace {

/// Lines are sent in one piece and never block, because they are shorter than the buffer of a socket.
constexpr std::size_t kMostText = 2000;
constexpr std::chrono::milliseconds kLook(20);
/// How long rank 0 waits for answers about a late call, and the other ranks wait for rank 0.
constexpr std::chrono::milliseconds kAnswerLimit(300), kVerdictLimit(1000);
/// A backend may report a lost connection before the guard detects the end of the rank.
constexpr std::chrono::milliseconds kErrorDelay(200);

void send_line(int fd, const std::string& line) noexcept {
  static_cast<void>(::send(fd, line.data(), line.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
}

/// Makes the kernel close a connection to an unreachable host.
void keep_alive(int fd) noexcept {
  const int on = 1, idle = 5, interval = 5, count = 3;
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

std::string line_of(const GroupGuard::Failure& failure) {
  return fmt::format("fail {} {} {}\n", static_cast<int>(failure.kind), failure.failed_rank, failure.text);
}

std::string new_token() {
  std::uint64_t words[2] = {};
  if (::getrandom(words, sizeof words, 0) != sizeof words) throw Error("getrandom() gives no random numbers");
  return fmt::format("{:016x}{:016x}", words[0], words[1]);
}

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

std::string GroupGuard::listen(const LaunchEnvironment& environment) {
  const bool one_host = environment.local_world_size == ranks_;
  const std::string address = one_host ? usable_loopback("127.0.0.1") : address_towards(environment.master_addr);
  if (address.empty()) return {};  // There is no route to the other hosts.
  const auto port = listen_on(address, listener_);
  if (!port)
    throw RendezvousError(fmt::format("rank {} cannot listen on {}: {}", name_, address, std::strerror(errno)));
  token_ = new_token();
  return fmt::format("{} {} {} {} {}", address, *port, token_, name_, ::getpid());
}

void GroupGuard::connect(const std::string& offer) {
  if (offer.empty()) return;
  std::istringstream words(offer);
  std::string address, port;
  Peer peer;
  words >> address >> port >> token_ >> peer.name >> peer.pid;
  peer.fd = connect_to(address, port, timeout_);
  if (peer.fd < 0)
    throw RendezvousError(
        fmt::format("rank {} cannot reach rank {} at {}:{}: {}", name_, peer.name, address, port, std::strerror(errno)),
        {.rank = name_, .call = "rendezvous"});
  keep_alive(peer.fd);
  send_line(peer.fd, fmt::format("hello {} {} {}\n", token_, name_, ::getpid()));
  peers_.push_back(std::move(peer));
}

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
  fail_if_unwinding();
  send_to_all("bye\n");
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
    ::poll(descriptors.data(), descriptors.size(), soon ? static_cast<int>(kLook.count()) : -1);
    std::uint64_t count = 0;
    static_cast<void>(!::read(wake_, &count, sizeof count));
    if (stops_) return;
    for (std::size_t i = 2; i < descriptors.size(); ++i) {
      Peer& peer = peers_[i - 2];
      if (descriptors[i].revents == 0 || read(peer)) continue;
      const std::lock_guard lock(mutex_);
      ::close(std::exchange(peer.fd, -1));
    }
    if (descriptors[1].revents != 0) accept();
    soon = look();
    if (failed_ && !std::exchange(aborted, true)) actions_.abort();
  }
}

void GroupGuard::accept() {
  const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  if (fd < 0) return;
  keep_alive(fd);
  const std::lock_guard lock(mutex_);
  peers_.push_back({.fd = fd});
}

bool GroupGuard::read(Peer& peer) {
  char bytes[4096];
  const ssize_t count = ::recv(peer.fd, bytes, sizeof bytes, MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (count <= 0) {
    if (peer.name >= 0)
      fail({FailureKind::kPeerLost, peer.name, fmt::format("rank {} (pid {}) has ended", peer.name, peer.pid)});
    return false;
  }
  peer.unread.append(bytes, static_cast<std::size_t>(count));
  for (std::size_t end; (end = peer.unread.find('\n')) != std::string::npos;) {
    const std::string line = peer.unread.substr(0, end + 1);
    peer.unread.erase(0, end + 1);
    if (!take(peer, line)) return false;
  }
  return peer.unread.size() < 2 * kMostText;
}

bool GroupGuard::take(Peer& peer, const std::string& line) {
  std::istringstream words(line);
  std::string word;
  words >> word;
  if (peer.name < 0) return word == "hello" && take_hello(peer, words);
  if (word == "bye") return false;
  if (word == "end") {
    const std::lock_guard lock(mutex_);
    peer.ends = true;
    if (!leads_) all_end_ = true;
  }
  if (word == "fail") take_failure(peer, words, line);
  if (word == "late" || word == "where") {
    LateCall late;
    words >> late.name >> late.number >> late.kind;
    std::getline(words >> std::ws, late.text);
    if (word == "late") {
      ask(std::move(late));
    } else {
      send_line(peer.fd, fmt::format("here {}\n", answer_to(late)));
    }
  }
  if (word == "here") {
    peer.answer.emplace();
    std::getline(words >> std::ws, *peer.answer);
  }
  return true;
}

bool GroupGuard::take_hello(Peer& peer, std::istream& words) {
  std::string token;
  int name = -1, pid = 0;
  if (!(words >> token >> name >> pid) || token != token_) return false;
  const std::lock_guard lock(mutex_);
  peer.pid = pid;
  peer.name = name;
  const bool complete = std::ranges::count_if(peers_, [](const Peer& each) { return each.name >= 0; }) == ranks_ - 1;
  if (complete) ::close(std::exchange(listener_, -1));
  if (failed_) send_line(peer.fd, line_of(failure_));  // The peer connected after the failure.
  return true;
}

void GroupGuard::take_failure(Peer& peer, std::istream& words, const std::string& line) {
  int kind = 0;
  Failure failure;
  words >> kind >> failure.failed_rank;
  std::getline(words >> std::ws, failure.text);
  failure.kind = static_cast<FailureKind>(kind);
  note(failure);
  send_to_all(line, &peer);
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
  if (leads_ && ends_ && !all_end_) look_for_end();
  if (is_busy) look_for_error();
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

void GroupGuard::look_for_error() {
  if (error_.empty()) {
    error_ = actions_.error();
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
  for (const Peer& peer : peers_)
    add(peer.name, peer.answer ? *peer.answer : peer.fd < 0 ? "has left the group" : "does not answer");
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
  send_to_all(line_of(shown));
  wake();
}

void GroupGuard::abort(const std::string& reason) noexcept {
  fail({FailureKind::kAborted, name_, fmt::format("rank {} aborted: {}", name_, reason)});
}

void GroupGuard::send_to_all(const std::string& line, const Peer* but) noexcept {
  const std::lock_guard lock(mutex_);
  for (const Peer& peer : peers_) {
    if (&peer != but && peer.name >= 0 && peer.fd >= 0) send_line(peer.fd, line);
  }
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
