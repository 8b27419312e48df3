// Tier 0: the standard library only. The wire format of the keyed store.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/store/sha256.h"

namespace ddpkit::store {

// A connection begins with a handshake:
//   client: kMagic, client nonce            server: server nonce
//   client: SHA-256 of the run, proof       server: Verdict, proof (zeros if refused)
// After the handshake, the client sends one request at a time as a frame, and the server replies with one frame:
//   length of the payload (4 bytes, little endian), payload, MAC
// The MAC also covers the number of the frame in its direction. A repeated, reordered or lost frame has a wrong MAC.

inline constexpr std::string_view kMagic = "ddpkit-1";
inline constexpr std::size_t kHelloBytes = kMagic.size() + sizeof(Digest);
inline constexpr std::size_t kProofBytes = 2 * sizeof(Digest);
inline constexpr std::size_t kVerdictBytes = 1 + sizeof(Digest);
inline constexpr std::size_t kHeaderBytes = 4, kMacBytes = 16;
static_assert(kHelloBytes <= 128 && kProofBytes <= 128);

/// Connections without a proof, and the time for the proof.
inline constexpr std::size_t kMostStrangers = 64;
inline constexpr std::chrono::seconds kProofLimit(5);

struct StoreLimits {
  std::size_t value_bytes = std::size_t{64} << 20;  ///< Of one value.
  std::size_t total_bytes = std::size_t{1} << 30;   ///< Of all keys and values.
};
/// A frame may hold the largest value and its key.
inline constexpr std::size_t kMostPayload = StoreLimits{}.value_bytes + (std::size_t{1} << 20);

enum class Verdict : char { kWelcome, kWrongKey, kWrongRun };

/// The nonces of both sides and the run.
struct Session {
  Digest client{}, server{};
  Digest run{};  ///< SHA-256 of the run's name.
};

/// Random bytes from the kernel. Throws Error if the kernel returns none.
Digest random_digest();
Digest digest_of(std::string_view bytes);

Digest client_proof(const Hmac& key, const Session& session);
Digest server_proof(const Hmac& key, const Session& session);

/// The key and the number of the next frame of one direction.
class Direction {
 public:
  static Direction to_server(const Hmac& key, const Session& session);
  static Direction to_client(const Hmac& key, const Session& session);

  /// Returns header, payload and MAC.
  std::string seal(std::string_view payload);
  /// Returns whether the MAC is that of the next frame.
  bool accept(std::string_view payload, std::string_view mac);

 private:
  explicit Direction(const Digest& key) : key_(bytes_of(key)) {}
  Digest mac(std::string_view payload);

  Hmac key_;
  std::uint64_t number_ = 0;
};

/// Length of the payload in a frame's header.
std::size_t payload_bytes(std::string_view header);

enum class Operation : char { kSet = 1, kCompareSet, kAdd, kAppend, kDelete, kCheck, kCount, kGet, kWait };
enum class Status : char { kOk, kTimeout, kRefused };

/// Appends fields to a request or reply.
class Writer {
 public:
  template <class Code>
  explicit Writer(Code code) : text_(1, static_cast<char>(code)) {}
  Writer& number(std::int64_t value);
  Writer& text(std::string_view value);
  Writer& texts(const std::vector<std::string>& values);
  std::string finish() { return std::move(text_); }

 private:
  std::string text_;
};

/// Reads the fields. Returns empty values after the end or for a wrong length; ok() then returns false.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}
  char code();
  std::int64_t number();
  std::string_view text();
  std::vector<std::string> texts();
  bool at_end() const { return text_.empty(); }
  /// Returns whether all fields were complete and nothing follows.
  bool ok() const { return !failed_ && text_.empty(); }

 private:
  std::string_view take(std::size_t bytes);

  std::string_view text_;
  bool failed_ = false;
};

}  // namespace ddpkit::store
