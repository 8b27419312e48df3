// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ddpkit::bench {

/// Where one rank stands in a collective: `slice` is the number of elements in one rank's share.
struct Place {
  int rank = 0;
  int ranks = 1;
  std::size_t slice = 0;
};

/// How much a rank's buffer holds: all the bytes of the row, or one rank's share of them.
enum class Extent { kWhole, kSlice };

/// What there is to know about a collective apart from how to call it. The root is rank 0 everywhere. Elements are
/// float32.
struct Collective {
  std::string_view name;
  /// Bytes that cross a rank's link for each byte of the row: busbw = algbw * bus_factor(ranks), as nccl-tests has it.
  double (*bus_factor)(int ranks);
  Extent input;
  Extent output;
  bool is_cut;     ///< The row's bytes are cut into one share for each rank.
  bool in_place;   ///< The output is the input's buffer.
  bool root_only;  ///< Only the root gets a result.
  /// Element i of the output on a correct rank, when rank r's input is input_value(r, i).
  float (*expected)(const Place& place, std::size_t i);
};

/// Every collective that a backend may be measured at, in the table's order.
const std::vector<Collective>& collectives();

/// The one of this name. Throws InvalidArgument.
const Collective& find_collective(std::string_view name);

/// Bytes that a row of about `bytes` really has: whole elements, and as many in each rank's share; at least one.
std::uint64_t exact_bytes(const Collective& collective, std::uint64_t bytes, int ranks);

/// Element i of rank r's input: an integer of 0 to 255, so that sums over up to 65,536 ranks are exact in float32, and
/// unlike at every rank and offset, so that a misplaced element shows.
inline float input_value(int rank, std::size_t i) {
  const auto mixed = static_cast<std::uint32_t>(i) * 0x9E3779B1u + static_cast<std::uint32_t>(rank + 1) * 0x85EBCA6Bu;
  return static_cast<float>((mixed ^ (mixed >> 15)) >> 24);
}

void fill_input(int rank, float* elements, std::size_t count);

/// How many of the output's elements are not what they must be.
std::uint64_t count_wrong(const Collective& collective, const Place& place, const float* output, std::size_t count);

}  // namespace ddpkit::bench
