#include "train/state/crc32.h"

#include <array>
#include <bit>
#include <cstring>

namespace ddpkit::train {
namespace {

static_assert(std::endian::native == std::endian::little, "words are taken as they lie in memory");

using Table = std::array<std::array<std::uint32_t, 256>, 8>;

/// `polynomial` with its bits reversed.
constexpr Table make_table(std::uint32_t polynomial) {
  Table table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? polynomial : 0U);
    table[0][byte] = value;
  }
  for (std::size_t k = 1; k < table.size(); ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte)
      table[k][byte] = (table[k - 1][byte] >> 8) ^ table[0][table[k - 1][byte] & 0xff];
  }
  return table;
}

constexpr Table kIso = make_table(0xedb88320U), kCastagnoli = make_table(0x82f63b78U);

std::uint32_t checksum(const Table& table, const void* data, std::size_t bytes, std::uint32_t before) {
  const auto* next = static_cast<const unsigned char*>(data);
  std::uint32_t value = ~before;
  // Eight bytes per iteration (Kounavis and Berry, ISCC 2005).
  for (; bytes >= 8; bytes -= 8, next += 8) {
    std::uint32_t low = 0, high = 0;
    std::memcpy(&low, next, 4);
    std::memcpy(&high, next + 4, 4);
    low ^= value;
    value = table[7][low & 0xff] ^ table[6][(low >> 8) & 0xff] ^ table[5][(low >> 16) & 0xff] ^ table[4][low >> 24] ^
            table[3][high & 0xff] ^ table[2][(high >> 8) & 0xff] ^ table[1][(high >> 16) & 0xff] ^ table[0][high >> 24];
  }
  for (; bytes > 0; --bytes) value = (value >> 8) ^ table[0][(value ^ *next++) & 0xff];
  return ~value;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t crc32c_by_instruction(const void* data, std::size_t bytes,
                                                                      std::uint32_t before) {
  const auto* next = static_cast<const unsigned char*>(data);
  std::uint64_t value = ~before;
  for (; bytes >= 8; bytes -= 8, next += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, next, 8);
    value = __builtin_ia32_crc32di(value, word);
  }
  auto low = static_cast<std::uint32_t>(value);
  for (; bytes > 0; --bytes) low = __builtin_ia32_crc32qi(low, *next++);
  return ~low;
}
#endif

}  // namespace

std::uint32_t crc32(const void* data, std::size_t bytes, std::uint32_t before) {
  return checksum(kIso, data, bytes, before);
}

std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t before) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return crc32c_by_instruction(data, bytes, before);
#endif
  return checksum(kCastagnoli, data, bytes, before);
}

}  // namespace ddpkit::train
