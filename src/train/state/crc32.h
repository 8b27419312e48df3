// Tier 0. Checksums of file formats.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ddpkit::train {

/// Of zip files (ISO 3309), of the bytes before and these.
std::uint32_t crc32(const void* data, std::size_t bytes, std::uint32_t before = 0);

/// The same with Castagnoli's polynomial (RFC 3720, B.4): of TFRecord. By the processor's instruction where it has one.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t before = 0);

}  // namespace ddpkit::train
