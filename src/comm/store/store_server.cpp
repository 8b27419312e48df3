#include "comm/store/store_server.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <list>
#include <optional>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/store/store_table.h"

namespace ddpkit::store {
namespace {

using Clock = std::chrono::steady_clock;

/// With as many strangers as permitted, a newcomer replaces one that has had this time for its proof.
constexpr std::chrono::milliseconds kPatience(100);
/// Interval between attempts to accept while no connection is possible.
constexpr std::chrono::milliseconds kPause(10);

}  // namespace

class StoreServer::Loop {
 public:
  Loop(int listener, const Digest& key, const std::string& run, const StoreLimits& limits)
      : listener_(listener), key_(bytes_of(key)), run_(sha256(run)), table_(limits) {
    ::fcntl(listener_, F_SETFL, O_NONBLOCK);
    if (epoll_ < 0 || stop_ < 0 || !watch(EPOLL_CTL_ADD, listener_, EPOLLIN, &listener_) ||
        !watch(EPOLL_CTL_ADD, stop_, EPOLLIN, &stop_)) {
      const int error = errno;
      close_descriptors();
      throw Error(fmt::format("the store cannot be served: {}", std::strerror(error)));
    }
  }
  ~Loop() {
    connections_.clear();
    close_descriptors();
  }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  void stop() const {
    const std::uint64_t one = 1;
    while (::write(stop_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  void run() {
    std::array<epoll_event, 64> events{};
    for (;;) {
      const int count = ::epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), wait_ms());
      bool has_newcomers = is_paused_;
      for (int i = 0; i < count; ++i) {
        const epoll_event& event = events[static_cast<std::size_t>(i)];
        if (event.data.ptr == &stop_) return;
        if (event.data.ptr == &listener_)
          has_newcomers = true;
        else
          serve(*static_cast<Connection*>(event.data.ptr), event.events);
      }
      end_late();
      erase_ended();  // No event of this round names an erased connection.
      if (has_newcomers) accept_all();
    }
  }

 private:
  /// A client waits for a reply before its next request. Other bytes that arrive meanwhile end its connection.
  struct Connection {
    enum class Stage { kHello, kProof, kOpen };

    Connection(int descriptor, Clock::time_point now) : fd(descriptor), since(now) {}
    ~Connection() { ::close(fd); }
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    bool is_stranger() const { return stage != Stage::kOpen; }
    bool is_busy() const { return pending || sent < out.size(); }

    const int fd;
    const Clock::time_point since;
    Stage stage = Stage::kHello;
    Session session{};
    std::optional<Direction> from_client{}, to_client{};
    std::string in{}, out{};
    std::size_t sent = 0;     ///< Bytes of `out`.
    bool is_blocked = false;  ///< The kernel's buffer is full.
    std::optional<PendingRequest> pending{};
    bool is_ended = false;
  };

  bool watch(int operation, int fd, std::uint32_t what, void* tag) const {
    epoll_event event{};
    event.events = what;
    event.data.ptr = tag;
    return ::epoll_ctl(epoll_, operation, fd, &event) == 0;
  }

  void close_descriptors() const {
    for (const int fd : {listener_, epoll_, stop_}) {
      if (fd >= 0) ::close(fd);
    }
  }

  int wait_ms() const {
    const Clock::time_point until = is_paused_ ? std::min(next_deadline_, Clock::now() + kPause) : next_deadline_;
    if (until == Clock::time_point::max()) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    return static_cast<int>(std::clamp<std::int64_t>(left, 0, 3'600'000));
  }

  void accept_all() {
    bool is_full = false;
    for (std::size_t count = 0; count < kMostStrangers && !is_full; ++count) {
      is_full = strangers_ >= kMostStrangers && !end_patience();
      if (is_full) break;
      const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      is_full = fd < 0 && (errno == EMFILE || errno == ENFILE);
      if (fd < 0) break;
      const int on = 1;
      ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
      Connection& connection = connections_.emplace_back(fd, Clock::now());
      ++strangers_;
      next_deadline_ = std::min(next_deadline_, connection.since + kProofLimit);
      if (!watch(EPOLL_CTL_ADD, fd, EPOLLIN, &connection)) end(connection);
    }
    // Without a pause, the waiting newcomers would wake this loop again and again.
    if (is_full != is_paused_) watch(EPOLL_CTL_MOD, listener_, is_full ? 0u : EPOLLIN, &listener_);
    is_paused_ = is_full;
    erase_ended();
  }

  /// Ends the oldest stranger, if it has had its time. So connections that send nothing cannot keep ranks out.
  bool end_patience() {
    const auto oldest = std::ranges::find_if(connections_, &Connection::is_stranger);
    if (oldest == connections_.end() || Clock::now() - oldest->since < kPatience) return false;
    end(*oldest);
    erase_ended();
    return true;
  }

  void end(Connection& connection) {
    connection.is_ended = true;
    has_ended_ = true;
  }

  void erase_ended() {
    if (!std::exchange(has_ended_, false)) return;
    for (const Connection& at : connections_) strangers_ -= at.is_ended && at.is_stranger() ? 1 : 0;
    connections_.remove_if([](const Connection& at) { return at.is_ended; });
  }

  /// Answers the requests whose time has passed, and ends the strangers without a proof.
  void end_late() {
    const auto now = Clock::now();
    if (now < next_deadline_) return;
    next_deadline_ = Clock::time_point::max();
    for (Connection& at : connections_) {
      if (at.pending && at.pending->deadline <= now) {
        const PendingRequest late = *std::exchange(at.pending, std::nullopt);
        reply(at, at.to_client->seal(table_.answer_late(late)));
      }
      if (at.is_stranger() && now - at.since >= kProofLimit) end(at);
      if (at.is_ended) continue;
      if (at.is_stranger()) next_deadline_ = std::min(next_deadline_, at.since + kProofLimit);
      if (at.pending) next_deadline_ = std::min(next_deadline_, at.pending->deadline);
    }
  }

  void serve(Connection& at, std::uint32_t what) {
    if (at.is_ended) return;
    try {
      if (what & EPOLLOUT) flush(at);
      if (what & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(at);
    } catch (const std::exception&) {  // A malformed request, or no memory for it.
      end(at);
    }
  }

  void receive(Connection& at) {
    if (at.is_ended) return;
    const ssize_t got = ::recv(at.fd, buffer_.data(), buffer_.size(), 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0 || at.is_busy()) return end(at);
    at.in.append(buffer_.data(), static_cast<std::size_t>(got));
    switch (at.stage) {
      case Connection::Stage::kHello:
        return read_hello(at);
      case Connection::Stage::kProof:
        return read_proof(at);
      case Connection::Stage::kOpen:
        return read_request(at);
    }
  }

  void read_hello(Connection& at) {
    const std::size_t known = std::min(at.in.size(), kMagic.size());
    if (at.in.size() > kHelloBytes || at.in.compare(0, known, kMagic, 0, known) != 0) return end(at);
    if (at.in.size() < kHelloBytes) return;
    at.session.client = digest_of(std::string_view(at.in).substr(kMagic.size()));
    at.session.server = random_digest();
    at.stage = Connection::Stage::kProof;
    at.in.clear();
    reply(at, std::string(bytes_of(at.session.server)));
  }

  void read_proof(Connection& at) {
    if (at.in.size() > kProofBytes) return end(at);
    if (at.in.size() < kProofBytes) return;
    const std::string_view message = at.in;
    at.session.run = digest_of(message);
    const bool has_key =
        equal_in_constant_time(bytes_of(client_proof(key_, at.session)), message.substr(sizeof(Digest)));
    // Only a client with the key learns that its run is another one.
    const Verdict verdict = !has_key                 ? Verdict::kWrongKey
                            : at.session.run != run_ ? Verdict::kWrongRun
                                                     : Verdict::kWelcome;
    at.in.clear();
    std::string answer(1, static_cast<char>(verdict));
    answer.append(bytes_of(verdict == Verdict::kWelcome ? server_proof(key_, at.session) : Digest{}));
    if (verdict == Verdict::kWelcome) {
      at.from_client = Direction::to_server(key_, at.session);
      at.to_client = Direction::to_client(key_, at.session);
      at.stage = Connection::Stage::kOpen;
      --strangers_;
    }
    reply(at, std::move(answer));
    if (verdict != Verdict::kWelcome) end(at);
  }

  void read_request(Connection& at) {
    if (at.in.size() < kHeaderBytes) return;
    const std::size_t length = payload_bytes(at.in), bytes = kHeaderBytes + length + kMacBytes;
    if (length > kMostPayload || at.in.size() > bytes) return end(at);
    if (at.in.size() < bytes) return;
    const std::string frame = std::exchange(at.in, {});
    const auto payload = std::string_view(frame).substr(kHeaderBytes, length);
    if (!at.from_client->accept(payload, std::string_view(frame).substr(kHeaderBytes + length))) return end(at);
    const std::uint64_t changes = table_.changes();
    PendingRequest pending;
    if (auto answer = table_.answer(payload, pending)) {
      reply(at, at.to_client->seal(*answer));
    } else {
      next_deadline_ = std::min(next_deadline_, pending.deadline);
      at.pending = std::move(pending);
    }
    if (table_.changes() != changes) answer_pending();
  }

  void answer_pending() {
    for (Connection& at : connections_) {
      if (!at.pending || at.is_ended) continue;
      if (auto answer = table_.answer_pending(*at.pending)) {
        at.pending.reset();
        reply(at, at.to_client->seal(*answer));
      }
    }
  }

  void reply(Connection& at, std::string bytes) {
    at.out = std::move(bytes);
    at.sent = 0;
    flush(at);
  }

  void flush(Connection& at) {
    while (at.sent < at.out.size()) {
      const ssize_t sent = ::send(at.fd, at.out.data() + at.sent, at.out.size() - at.sent, MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0 && errno != EAGAIN) return end(at);
      if (sent < 0) break;
      at.sent += static_cast<std::size_t>(sent);
    }
    const bool is_blocked = at.sent < at.out.size();
    if (is_blocked != at.is_blocked) watch(EPOLL_CTL_MOD, at.fd, is_blocked ? EPOLLIN | EPOLLOUT : EPOLLIN, &at);
    at.is_blocked = is_blocked;
    if (is_blocked) return;
    at.out = {};
    at.sent = 0;
  }

  int listener_;
  int epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  int stop_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  const Hmac key_;
  const Digest run_;
  StoreTable table_;
  std::list<Connection> connections_;  ///< In the order of their arrival.
  std::size_t strangers_ = 0;
  Clock::time_point next_deadline_ = Clock::time_point::max();  ///< No deadline is earlier.
  bool is_paused_ = false;                                      ///< Does not accept connections.
  bool has_ended_ = false;
  std::array<char, 65536> buffer_{};
};

StoreServer::StoreServer(int listener, const Digest& key, const std::string& run, const StoreLimits& limits)
    : loop_(std::make_unique<Loop>(listener, key, run, limits)) {
  // Signals belong to the threads of the program.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { loop_->run(); });
  } catch (const std::system_error& error) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw Error(fmt::format("the store cannot be served: {}", error.what()));
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

StoreServer::~StoreServer() {
  loop_->stop();
  thread_.join();
}

}  // namespace ddpkit::store
