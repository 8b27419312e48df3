#include "comm/store/wire.h"

#include <sys/random.h>

#include <algorithm>
#include <array>

#include <ddpkit/error.h>

namespace ddpkit::store {
namespace {

std::array<char, 8> little_endian(std::uint64_t value) {
  std::array<char, 8> bytes{};
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(value >> (8 * i));
  return bytes;
}

std::uint64_t from_little_endian(std::string_view bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i)
    value |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  return value;
}

/// The fields have fixed lengths, and no purpose is the beginning of another.
Digest derive(const Hmac& key, std::string_view purpose, const Session& session) {
  return key.of({purpose, bytes_of(session.client), bytes_of(session.server), bytes_of(session.run)});
}

}  // namespace

Digest random_digest() {
  Digest bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throw Error("getrandom() gives no random numbers");
  return bytes;
}

Digest digest_of(std::string_view bytes) {
  Digest digest{};
  std::copy_n(bytes.begin(), std::min(bytes.size(), digest.size()), digest.begin());
  return digest;
}

Digest client_proof(const Hmac& key, const Session& session) { return derive(key, "proof of client", session); }
Digest server_proof(const Hmac& key, const Session& session) { return derive(key, "proof of server", session); }

Direction Direction::to_server(const Hmac& key, const Session& session) {
  return Direction(derive(key, "frames to server", session));
}
Direction Direction::to_client(const Hmac& key, const Session& session) {
  return Direction(derive(key, "frames to client", session));
}

Digest Direction::mac(std::string_view payload) {
  const auto number = little_endian(number_++);
  return key_.of({{number.data(), number.size()}, payload});
}

std::string Direction::seal(std::string_view payload) {
  const Digest code = mac(payload);
  std::string frame;
  frame.reserve(kHeaderBytes + payload.size() + kMacBytes);
  frame.append(little_endian(payload.size()).data(), kHeaderBytes).append(payload);
  return frame.append(bytes_of(code).substr(0, kMacBytes));
}

bool Direction::accept(std::string_view payload, std::string_view code) {
  const Digest wanted = mac(payload);
  return equal_in_constant_time(bytes_of(wanted).substr(0, kMacBytes), code);
}

std::size_t payload_bytes(std::string_view header) { return from_little_endian(header.substr(0, kHeaderBytes)); }

Writer& Writer::number(std::int64_t value) {
  text_.append(little_endian(static_cast<std::uint64_t>(value)).data(), 8);
  return *this;
}

Writer& Writer::text(std::string_view value) {
  text_.append(little_endian(value.size()).data(), 4).append(value);
  return *this;
}

Writer& Writer::texts(const std::vector<std::string>& values) {
  for (const std::string& value : values) text(value);
  return *this;
}

std::string_view Reader::take(std::size_t bytes) {
  failed_ = failed_ || bytes > text_.size();
  if (failed_) return {};
  const std::string_view taken = text_.substr(0, bytes);
  text_.remove_prefix(bytes);
  return taken;
}

char Reader::code() {
  const std::string_view byte = take(1);
  return byte.empty() ? '\xff' : byte[0];
}

std::int64_t Reader::number() { return static_cast<std::int64_t>(from_little_endian(take(8))); }

std::string_view Reader::text() { return take(from_little_endian(take(4))); }

std::vector<std::string> Reader::texts() {
  std::vector<std::string> values;
  while (!failed_ && !at_end()) values.emplace_back(text());
  return values;
}

}  // namespace ddpkit::store
