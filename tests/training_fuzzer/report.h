// The values and errors of a rank or of the reference. Sent to the parent through a pipe, so that the comparison does
// not use the group under test.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddpkit::fuzz {

/// The comparison of a tensor.
enum class Kind : std::uint8_t {
  kWeight,    ///< The same bits on all ranks.
  kGradient,  ///< Averaged: the same bits on all ranks.
  kLocal,     ///< Of this rank only.
};

struct Entry {
  std::uint32_t event = 0;
  Kind kind = Kind::kWeight;
  std::string name;
  std::vector<double> values;  ///< In double, which represents each type exactly; a complex number has two values.
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
