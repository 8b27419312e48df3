#include "comm/store/keyed_store.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/timeout.h"

namespace ddpkit::store {
namespace {

using Clock = std::chrono::steady_clock;

std::string_view view_of(const std::vector<std::uint8_t>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
std::vector<std::uint8_t> vector_of(std::string_view text) { return {text.begin(), text.end()}; }

[[noreturn]] void throw_lost(const std::string& name, const std::string& reason) {
  C10_THROW_ERROR(DistNetworkError, fmt::format("the connection to the store at {} is lost: {}", name, reason));
}

/// c10d's timeout 0 has no limit.
std::chrono::milliseconds limit_of(std::chrono::milliseconds timeout) {
  return clamp_timeout(timeout > c10d::Store::kNoTimeout ? timeout : std::chrono::milliseconds::max());
}

std::string seconds_of(std::chrono::milliseconds time) {
  return fmt::format("{:.1f} s", std::chrono::duration<double>(time).count());
}

}  // namespace

/// A connected socket and its session. The functions return an error's reason, empty on success.
class KeyedStore::Socket {
 public:
  explicit Socket(int family) : fd_(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {}
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  std::string connect(const StorePlace& place, Clock::time_point deadline) {
    if (fd_ < 0) return std::strerror(errno);
    const int on = 1;
    ::setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    ::setsockopt(fd_, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    if (::connect(fd_, reinterpret_cast<const sockaddr*>(&place.address.bytes), place.address.length) == 0) return {};
    if (errno != EINPROGRESS) return std::strerror(errno);
    if (!wait_until(POLLOUT, deadline)) return "no answer";
    int error = 0;
    socklen_t length = sizeof error;
    ::getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &length);
    return error == 0 ? "" : std::strerror(error);
  }

  std::string send(std::string_view bytes, Clock::time_point deadline) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent > 0)
        bytes.remove_prefix(static_cast<std::size_t>(sent));
      else if (errno != EAGAIN && errno != EINTR)
        return std::strerror(errno);
      else if (!wait_until(POLLOUT, deadline))
        return "it reads nothing";
    }
    return {};
  }

  std::string receive(std::string& bytes, std::size_t count, Clock::time_point deadline) {
    bytes.resize(count);
    for (std::size_t at = 0; at < count;) {
      const ssize_t got = ::recv(fd_, bytes.data() + at, count - at, 0);
      if (got == 0) return "it closed the connection";
      if (got > 0)
        at += static_cast<std::size_t>(got);
      else if (errno != EAGAIN && errno != EINTR)
        return std::strerror(errno);
      else if (!wait_until(POLLIN, deadline))
        return "it does not answer";
    }
    return {};
  }

  std::optional<Direction> to_server, to_client;

 private:
  bool wait_until(short what, Clock::time_point deadline) const {
    for (;;) {
      const auto left = std::min<std::chrono::milliseconds>(time_until(deadline), std::chrono::hours(1));
      pollfd place{fd_, what, 0};
      const int ready = ::poll(&place, 1, static_cast<int>(left.count()));
      if (ready > 0) return true;
      if (ready < 0 && errno != EINTR) return true;  // The next call reports the error.
      if (Clock::now() >= deadline) return false;
    }
  }

  int fd_;
};

KeyedStore::KeyedStore(StorePlace place, std::chrono::milliseconds timeout, std::chrono::milliseconds grace,
                       const std::function<void()>& check)
    : Store(clamp_timeout(timeout)), place_(std::move(place)), grace_(grace) {
  const auto deadline = Clock::now() + timeout_;
  std::string reason;
  auto nap = std::chrono::milliseconds(2);
  for (;;) {
    check();
    if (join(reason)) return;
    if (Clock::now() >= deadline)
      throw RendezvousError(fmt::format("the handshake with the store at {} did not succeed within {}: {}", place_.name,
                                        seconds_of(timeout_), reason),
                            {.call = "rendezvous"});
    std::this_thread::sleep_for(nap);
    nap = std::min(nap * 2, std::chrono::milliseconds(100));
  }
}

KeyedStore::~KeyedStore() = default;

c10::intrusive_ptr<c10d::Store> KeyedStore::clone() {
  return c10::make_intrusive<KeyedStore>(place_, timeout_, grace_);
}

bool KeyedStore::join(std::string& reason) {
  const auto deadline = Clock::now() + std::min<std::chrono::milliseconds>(timeout_, kProofLimit);
  auto socket = std::make_unique<Socket>(place_.address.bytes.ss_family);
  const Hmac key(bytes_of(place_.key));
  Session session{.client = random_digest(), .server = {}, .run = sha256(place_.run)};
  std::string hello(kMagic), nonce, verdict, proof(bytes_of(session.run));
  hello.append(bytes_of(session.client));
  const auto fails = [&](const std::string& error) {
    reason = error;
    return !error.empty();
  };
  if (fails(socket->connect(place_, deadline)) || fails(socket->send(hello, deadline)) ||
      fails(socket->receive(nonce, sizeof(Digest), deadline)))
    return false;
  session.server = digest_of(nonce);
  proof.append(bytes_of(client_proof(key, session)));
  if (fails(socket->send(proof, deadline)) || fails(socket->receive(verdict, kVerdictBytes, deadline))) return false;
  std::string refusal;
  if (verdict[0] == static_cast<char>(Verdict::kWrongKey))
    refusal = "refuses this process: its key is not the key of the store; give all hosts the same key file";
  else if (verdict[0] == static_cast<char>(Verdict::kWrongRun))
    refusal = fmt::format(
        "refuses this process: it belongs to the run \"{}\", the store to another one; each run needs its own port",
        place_.run);
  else if (!equal_in_constant_time(bytes_of(server_proof(key, session)), std::string_view(verdict).substr(1)))
    refusal = "does not have the key of this run: another program has this port";
  if (!refusal.empty())
    throw RendezvousError(fmt::format("the store at {} {}", place_.name, refusal), {.call = "rendezvous"});
  socket->to_server = Direction::to_server(key, session);
  socket->to_client = Direction::to_client(key, session);
  socket_ = std::move(socket);
  return true;
}

std::string KeyedStore::exchange(const std::string& request, std::chrono::milliseconds waited) {
  if (request.size() > kMostPayload)
    C10_THROW_ERROR(DistStoreError, fmt::format("a request to the store has {} bytes; at most {} are possible: set "
                                                "fewer values per call",
                                                request.size(), kMostPayload));
  const std::lock_guard lock(mutex_);
  if (!socket_) throw_lost(place_.name, "an earlier call failed");
  const auto deadline = Clock::now() + waited + grace_;
  std::string header, reply, code;
  std::string error = socket_->send(socket_->to_server->seal(request), deadline);
  if (error.empty()) error = socket_->receive(header, kHeaderBytes, deadline);
  if (error.empty() && payload_bytes(header) > kMostPayload) error = "it sent no frame";
  if (error.empty()) error = socket_->receive(reply, payload_bytes(header), deadline);
  if (error.empty()) error = socket_->receive(code, kMacBytes, deadline);
  if (error.empty() && !socket_->to_client->accept(reply, code)) error = "a frame has a wrong code";
  if (!error.empty()) {
    socket_.reset();
    throw_lost(place_.name, error);
  }
  return reply;
}

std::string KeyedStore::ask(const std::string& request, std::optional<std::chrono::milliseconds> waited) {
  const std::string reply = exchange(request, waited.value_or(limit_of(timeout_)));
  Reader fields(reply);
  const auto status = static_cast<Status>(fields.code());
  if (status == Status::kRefused) C10_THROW_ERROR(DistStoreError, std::string(fields.text()));
  if (status == Status::kTimeout) {
    const std::vector<std::string> missing = fields.texts();
    C10_THROW_ERROR(
        DistStoreError,
        fmt::format("the wait timed out: nobody has set \"{}\"{} within {}", missing.empty() ? "" : missing.front(),
                    missing.size() < 2 ? "" : fmt::format(" and {} more keys", missing.size() - 1),
                    seconds_of(waited.value_or(timeout_))));
  }
  return reply.substr(1);
}

std::string KeyedStore::ask_and_wait(Operation operation, const std::vector<std::string>& keys,
                                     std::chrono::milliseconds timeout) {
  const auto limit = limit_of(timeout);
  return ask(Writer(operation).number(limit.count()).texts(keys).finish(), limit);
}

void KeyedStore::check_size(const std::string& key, std::size_t bytes) const {
  if (bytes > StoreLimits{}.value_bytes)
    C10_THROW_ERROR(DistStoreError, fmt::format("the value of \"{}\" has {} bytes; the store accepts at most {}", key,
                                                bytes, StoreLimits{}.value_bytes));
}

void KeyedStore::set(const std::string& key, const std::vector<std::uint8_t>& value) {
  check_size(key, value.size());
  ask(Writer(Operation::kSet).text(key).text(view_of(value)).finish());
}

std::vector<std::uint8_t> KeyedStore::compareSet(const std::string& key, const std::vector<std::uint8_t>& expected,
                                                 const std::vector<std::uint8_t>& desired) {
  check_size(key, desired.size());
  const std::string reply =
      ask(Writer(Operation::kCompareSet).text(key).text(view_of(expected)).text(view_of(desired)).finish());
  return vector_of(Reader(reply).text());
}

std::vector<std::uint8_t> KeyedStore::get(const std::string& key) {
  const std::string reply = ask_and_wait(Operation::kGet, {key}, timeout_);
  return vector_of(Reader(reply).text());
}

std::int64_t KeyedStore::add(const std::string& key, std::int64_t value) {
  const std::string reply = ask(Writer(Operation::kAdd).text(key).number(value).finish());
  return Reader(reply).number();
}

bool KeyedStore::deleteKey(const std::string& key) {
  const std::string reply = ask(Writer(Operation::kDelete).text(key).finish());
  return Reader(reply).number() != 0;
}

bool KeyedStore::check(const std::vector<std::string>& keys) {
  const std::string reply = ask(Writer(Operation::kCheck).texts(keys).finish());
  return Reader(reply).number() != 0;
}

std::int64_t KeyedStore::getNumKeys() {
  const std::string reply = ask(Writer(Operation::kCount).finish());
  return Reader(reply).number();
}

void KeyedStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void KeyedStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  ask_and_wait(Operation::kWait, keys, timeout);
}

bool KeyedStore::exists_within(const std::string& key, std::chrono::milliseconds timeout) {
  const std::string reply = exchange(Writer(Operation::kWait).number(timeout.count()).text(key).finish(), timeout);
  return Reader(reply).code() == static_cast<char>(Status::kOk);
}

void KeyedStore::append(const std::string& key, const std::vector<std::uint8_t>& value) {
  check_size(key, value.size());
  ask(Writer(Operation::kAppend).text(key).text(view_of(value)).finish());
}

std::vector<std::vector<std::uint8_t>> KeyedStore::multiGet(const std::vector<std::string>& keys) {
  const std::string reply = ask_and_wait(Operation::kGet, keys, timeout_);
  Reader fields(reply);
  std::vector<std::vector<std::uint8_t>> values;
  for (std::size_t i = 0; i < keys.size(); ++i) values.push_back(vector_of(fields.text()));
  return values;
}

void KeyedStore::multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<std::uint8_t>>& values) {
  if (keys.size() != values.size())
    C10_THROW_ERROR(ValueError, fmt::format("{} keys have {} values", keys.size(), values.size()));
  Writer request(Operation::kSet);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    check_size(keys[i], values[i].size());
    request.text(keys[i]).text(view_of(values[i]));
  }
  ask(request.finish());
}

}  // namespace ddpkit::store
