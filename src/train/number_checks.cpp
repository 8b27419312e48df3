// Numbers on a command line, strictly read.
#include <cmath>
#include <limits>
#include <string>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <ddpkit/parse_number.h>
#include <ddpkit/train/options.h>

namespace ddpkit::train {
namespace {

/// `must_be`: what it says of others. `shown`: in --help.
template <class Holds>
CLI::Validator number_that(const Holds& holds, const std::string& must_be, const std::string& shown) {
  return CLI::Validator(
      [holds, must_be](const std::string& text) {
        double value = 0;
        if (parse_number(text, value) && std::isfinite(value) && holds(value)) return std::string();
        return fmt::format("must be {}, not {}", must_be, text);
      },
      shown);
}

}  // namespace

CLI::Validator positive_number() {
  return number_that([](double value) { return value > 0; }, "a number above 0", "NUMBER > 0");
}

CLI::Validator number_from_zero() {
  return number_that([](double value) { return value >= 0; }, "a number from 0 on", "NUMBER >= 0");
}

CLI::Validator number_between(double least, double most) {
  return number_that([least, most](double value) { return value >= least && value <= most; },
                     fmt::format("a number from {} to {}", least, most), fmt::format("{} to {}", least, most));
}

CLI::Validator whole_number(std::int64_t least, std::int64_t most) {
  return CLI::Validator(
      [least, most](const std::string& text) {
        std::int64_t value = 0;
        if (!parse_number(text, value) || value > most)
          return fmt::format("must be a whole number up to {}, not {}", most, text);
        return value < least ? fmt::format("must be at least {}, not {}", least, text) : std::string();
      },
      most < std::numeric_limits<int>::max() ? fmt::format("{} to {}", least, most) : "");
}

}  // namespace ddpkit::train
