#include "comm/timeline_environment.h"

#include <fmt/format.h>

#include <atomic>
#include <cstdlib>
#include <string_view>

#include <ddpkit/error.h>
#include <ddpkit/parse_number.h>

namespace ddpkit {

std::optional<TimelineRequest> take_timeline_request() {
  static std::atomic<bool> taken{false};
  const char* path = std::getenv("DDPKIT_TIMELINE");
  if (!path || *path == '\0' || taken.exchange(true)) return std::nullopt;
  TimelineRequest request{.path = path};
  if (const char* steps = std::getenv("DDPKIT_TIMELINE_STEPS")) {
    const std::string_view text = steps;
    if (!parse_number(text, request.steps) || request.steps == 0)
      throw InvalidArgument(fmt::format("DDPKIT_TIMELINE_STEPS is \"{}\", but must be a positive number", text));
  }
  return request;
}

}  // namespace ddpkit
