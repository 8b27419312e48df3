#include "environment_number.h"

#include <cstdlib>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/parse_number.h>

namespace ddpkit::cli {

int number_from_environment(const char* name, int low, int high, int otherwise) {
  const char* text = std::getenv(name);
  if (!text || !*text) return otherwise;
  int number = 0;
  if (!parse_number(text, number) || number < low || number > high)
    throw InvalidArgument(fmt::format("{} is \"{}\", which is no number between {} and {}", name, text, low, high));
  return number;
}

}  // namespace ddpkit::cli
