// What a rank, or the reference in its place, has seen: sent to the parent through a pipe, so that nothing is compared
// over the group under test.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddpkit::fuzz {

/// How a tensor is judged.
enum class Kind : std::uint8_t {
  kWeight,    ///< The same bits on all ranks.
  kGradient,  ///< Averaged: the same bits on all ranks.
  kLocal,     ///< Of this rank alone.
};

struct Entry {
  std::uint32_t event = 0;
  Kind kind = Kind::kWeight;
  std::string name;
  std::vector<double> values;  ///< Every type converts without loss; complex numbers are two.
};

/// From the most to the least specific.
enum class Failure : std::uint8_t { kNone, kDdpkit, kPeerLost, kTimeout, kOther };

struct Report {
  std::vector<Entry> entries;
  Failure failure = Failure::kNone;
  std::uint32_t failed_event = 0;
  std::string message;

  std::string encoded() const;
  static Report decoded(const std::string& bytes);
};

}  // namespace ddpkit::fuzz
