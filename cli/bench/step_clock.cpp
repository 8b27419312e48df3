#include "step_clock.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "timing.h"

namespace ddpkit::bench {
namespace {

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

}  // namespace

void wait_for(c10::Device device) {
  if (!device.is_cpu()) current_stream(device).synchronize();
}

StepClock::StepClock(c10::Device device, int steps) : device_(device) {
  if (device.is_cpu()) {
    times_.reserve(static_cast<std::size_t>(steps) + 1);
  } else {
    events_.reserve(static_cast<std::size_t>(steps) + 1);
    wait_for(device);
  }
  start_us_ = microseconds(std::chrono::steady_clock::now().time_since_epoch());
  lap();
}

void StepClock::lap() {
  if (device_.is_cpu()) {
    times_.push_back(std::chrono::steady_clock::now());
    return;
  }
  // A PYTORCH_DEFAULT event has no timing.
  events_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  events_.back().record(current_stream(device_));
}

std::vector<double> StepClock::us() const {
  std::vector<double> us;
  for (std::size_t i = 1; i < times_.size(); ++i) us.push_back(microseconds(times_[i] - times_[i - 1]));
  if (events_.empty()) return us;
  events_.back().synchronize();
  for (std::size_t i = 1; i < events_.size(); ++i) us.push_back(1e3 * events_[i - 1].elapsedTime(events_[i]));
  return us;
}

}  // namespace ddpkit::bench
