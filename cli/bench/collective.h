// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ddpkit::bench {

/// The position of one rank in a collective. `slice`: elements in the share of one rank.
struct Place {
  int rank = 0;
  int ranks = 1;
  std::size_t slice = 0;
};

/// The size of a rank's buffer: all bytes of the row, or the share of one rank.
enum class Extent { kWhole, kSlice };

/// Describes a collective: everything except the call. Rank 0 is the root of all collectives. Elements are float32.
struct Collective {
  std::string_view name;
  /// busbw = algbw * bus_factor(ranks), as in nccl-tests.
  double (*bus_factor)(int ranks);
  Extent input;
  Extent output;
  bool is_cut;     ///< The row's bytes are split into one share per rank.
  bool in_place;   ///< The output buffer is the input buffer.
  bool root_only;  ///< Only the root receives a result.
  /// Returns the expected element i of a rank's output, if the input of rank r is input_value(r, i).
  float (*expected)(const Place& place, std::size_t i);
};

/// Returns all collectives that the benchmark can measure, in the order of the table.
const std::vector<Collective>& collectives();

/// Returns the collective with this name. Throws InvalidArgument.
const Collective& find_collective(std::string_view name);

/// Rounds `bytes` to whole elements and equal shares per rank. Returns at least one element per share.
std::uint64_t exact_bytes(const Collective& collective, std::uint64_t bytes, int ranks);

/// Returns element i of rank r's input: an integer from 0 to 255, so sums over up to 65,536 ranks are exact in float32.
/// Values differ between ranks and offsets, so a misplaced element is detected.
inline float input_value(int rank, std::size_t i) {
  const auto mixed = static_cast<std::uint32_t>(i) * 0x9E3779B1u + static_cast<std::uint32_t>(rank + 1) * 0x85EBCA6Bu;
  return static_cast<float>((mixed ^ (mixed >> 15)) >> 24);
}

void fill_input(int rank, float* elements, std::size_t count);

/// Returns the number of wrong elements in the output.
std::uint64_t count_wrong(const Collective& collective, const Place& place, const float* output, std::size_t count);

}  // namespace ddpkit::bench
