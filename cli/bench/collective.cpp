#include "collective.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

namespace ddpkit::bench {
namespace {

// Bus factors: bytes on the busiest link of a rank, per byte of the row (nccl-tests, doc/PERFORMANCE.md).
double once(int) { return 1; }
double all_but_own(int ranks) { return (ranks - 1.0) / ranks; }
double twice_all_but_own(int ranks) { return 2 * all_but_own(ranks); }

float sum_over_ranks(int ranks, std::size_t i) {
  float sum = 0;
  for (int rank = 0; rank < ranks; ++rank) sum += input_value(rank, i);
  return sum;
}

float sum(const Place& place, std::size_t i) { return sum_over_ranks(place.ranks, i); }
float sum_of_own_share(const Place& place, std::size_t i) {
  return sum_over_ranks(place.ranks, static_cast<std::size_t>(place.rank) * place.slice + i);
}
float of_root(const Place&, std::size_t i) { return input_value(0, i); }
float own_share_of_root(const Place& place, std::size_t i) {
  return input_value(0, static_cast<std::size_t>(place.rank) * place.slice + i);
}
float stacked(const Place& place, std::size_t i) {
  return input_value(static_cast<int>(i / place.slice), i % place.slice);
}
float exchanged(const Place& place, std::size_t i) {
  return input_value(static_cast<int>(i / place.slice),
                     static_cast<std::size_t>(place.rank) * place.slice + i % place.slice);
}
float of_previous(const Place& place, std::size_t i) {
  return input_value((place.rank + place.ranks - 1) % place.ranks, i);
}

}  // namespace

const std::vector<Collective>& collectives() {
  constexpr Extent kWhole = Extent::kWhole, kSlice = Extent::kSlice;
  //   name              bus factor         input   output  is_cut in_place root_only expected
  static const std::vector<Collective> all = {
      {"all_reduce", twice_all_but_own, kWhole, kWhole, false, true, false, sum},
      {"broadcast", once, kWhole, kWhole, false, true, false, of_root},
      {"all_gather", all_but_own, kSlice, kWhole, true, false, false, stacked},
      {"reduce_scatter", all_but_own, kWhole, kSlice, true, false, false, sum_of_own_share},
      {"reduce", once, kWhole, kWhole, false, true, true, sum},
      {"gather", all_but_own, kSlice, kWhole, true, false, true, stacked},
      {"scatter", all_but_own, kWhole, kSlice, true, false, false, own_share_of_root},
      {"all_to_all", all_but_own, kWhole, kWhole, true, false, false, exchanged},
      {"send_recv", once, kWhole, kWhole, false, false, false, of_previous},
  };
  return all;
}

const Collective& find_collective(std::string_view name) {
  std::vector<std::string_view> names;
  for (const Collective& collective : collectives()) {
    if (collective.name == name) return collective;
    names.push_back(collective.name);
  }
  throw InvalidArgument(fmt::format("there is no collective \"{}\"; there are {}", name, fmt::join(names, ", ")));
}

std::uint64_t exact_bytes(const Collective& collective, std::uint64_t bytes, int ranks) {
  const std::uint64_t unit = sizeof(float) * (collective.is_cut ? static_cast<std::uint64_t>(ranks) : 1);
  return std::max<std::uint64_t>(1, bytes / unit) * unit;
}

void fill_input(int rank, float* elements, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) elements[i] = input_value(rank, i);
}

std::uint64_t count_wrong(const Collective& collective, const Place& place, const float* output, std::size_t count) {
  if (collective.root_only && place.rank != 0) return 0;
  std::uint64_t wrong = 0;
  // `==` and not `!=`: a NaN must count as wrong.
  for (std::size_t i = 0; i < count; ++i) wrong += output[i] == collective.expected(place, i) ? 0 : 1;
  return wrong;
}

}  // namespace ddpkit::bench
