// Strict parsing of numbers on the command line.
#include <cmath>
#include <limits>
#include <string>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <ddpkit/comm/environment.h>
#include <ddpkit/error.h>
#include <ddpkit/parse_number.h>
#include <ddpkit/train/options.h>

namespace ddpkit::train {
namespace {

/// `must_be`: the requirement in the error message. `shown`: text in --help.
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

CLI::Validator rank_count() {
  return CLI::Validator(
      [](const std::string& text) {
        if (text == "gpu" || text == "cpu" || text == "auto") return std::string();
        int ranks = 0;
        const bool valid = parse_number(text, ranks) && ranks >= 1 && ranks <= 4096;
        return valid ? std::string() : fmt::format("must be a number from 1 to 4096, gpu, cpu or auto, not {}", text);
      },
      "");
}

int count_ranks(const std::string& text, int gpus) {
  if (text == "cpu" || (text == "auto" && gpus == 0)) return available_cores();
  if (text == "gpu" && gpus == 0)
    throw InvalidArgument("gpu: no GPU is visible on this host; ddpkit doctor shows the reason");
  if (text == "gpu" || text == "auto") return gpus;
  int ranks = 0;
  parse_number(text, ranks);
  return ranks;
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
