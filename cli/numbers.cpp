#include "numbers.h"

#include <cmath>
#include <cstdlib>
#include <string>

#include <fmt/format.h>

#include <ddpkit/comm/error.h>
#include <ddpkit/parse_number.h>

namespace ddpkit::cli {
namespace {

/// `must_be`: what it says of others. `shown`: in --help.
template <typename Number, typename Holds>
CLI::Validator number_that(const Holds& holds, const std::string& must_be, const std::string& shown) {
  return CLI::Validator(
      [holds, must_be](const std::string& text) {
        Number value{};
        if (parse_number(text, value) && holds(value)) return std::string();
        return fmt::format("must be {}, not {}", must_be, text);
      },
      shown);
}

}  // namespace

CLI::Validator positive_number() {
  return number_that<double>([](double value) { return std::isfinite(value) && value > 0; }, "a number above 0",
                             "POSITIVE");
}

CLI::Validator number_between(double low, double high) {
  return number_that<double>([low, high](double value) { return value >= low && value <= high; },
                             fmt::format("a number from {} to {}", low, high),
                             fmt::format("FLOAT in [{} - {}]", low, high));
}

CLI::Validator number_from_zero() {
  return number_that<double>([](double value) { return std::isfinite(value) && value >= 0; }, "a number from 0 on",
                             "NONNEGATIVE");
}

CLI::Validator whole_number_between(int low, int high) {
  return number_that<int>([low, high](int value) { return value >= low && value <= high; },
                          fmt::format("a whole number from {} to {}", low, high),
                          fmt::format("INT in [{} - {}]", low, high));
}

int number_from_environment(const char* name, int low, int high, int otherwise) {
  const char* text = std::getenv(name);
  if (!text || !*text) return otherwise;
  int number = 0;
  if (!parse_number(text, number) || number < low || number > high)
    throw InvalidArgument(fmt::format("{} is \"{}\", which is no number between {} and {}", name, text, low, high));
  return number;
}

}  // namespace ddpkit::cli
