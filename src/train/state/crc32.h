// Tier 0. Checksums of file formats.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ddpkit::train {

/// The CRC-32 of zip files (ISO 3309). `before`: the checksum of the previous bytes.
std::uint32_t crc32(const void* data, std::size_t bytes, std::uint32_t before = 0);

/// The same with Castagnoli's polynomial (RFC 3720, B.4), used by TFRecord. Uses the processor's instruction if
/// available.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t before = 0);

}  // namespace ddpkit::train
