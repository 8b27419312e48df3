// Tier 0: the standard library only. SHA-256 (FIPS 180-4) and HMAC (RFC 2104).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>

namespace ddpkit::store {

using Digest = std::array<std::uint8_t, 32>;

inline std::string_view bytes_of(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

class Sha256 {
 public:
  void add(std::string_view bytes);
  /// Call once, at the end.
  Digest finish();

 private:
  void add_block(const std::uint8_t* block);

  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::uint8_t, 64> block_{};
  std::uint64_t bytes_ = 0;
};

Digest sha256(std::string_view bytes);

/// HMAC-SHA256 with one key.
class Hmac {
 public:
  /// Keys of more than 64 bytes are hashed first, as the RFC requires.
  explicit Hmac(std::string_view key);
  /// Returns the HMAC of the joined parts. The caller makes the ends of the parts unambiguous.
  Digest of(std::initializer_list<std::string_view> parts) const;

 private:
  Sha256 inner_, outer_;  ///< Have read the padded key.
};

/// Compares two strings of the same length, in a time that does not depend on their contents.
bool equal_in_constant_time(std::string_view a, std::string_view b);

}  // namespace ddpkit::store
