#include "profile_file.h"

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "bench/timing.h"

namespace ddpkit::cli {
namespace {

using bench::median;
using nlohmann::json;

constexpr std::size_t kFewest = 5;  ///< Minimum number of steps for a median.

struct Span {
  double begin = 0, end = 0;
};

struct Step {
  Span forward, backward;
  std::map<int, scaling::BucketProfile> buckets;  ///< ready_us is on the clock of the file.
};

double number(const json& event, const char* key) {
  const double value = event.at(key).get<double>();
  if (!std::isfinite(value)) throw json::other_error::create(0, fmt::format("{} is {}", key, value), nullptr);
  return value;
}

/// Checks that the number fits into Integer; json's get() does not check.
template <std::signed_integral Integer>
Integer integer(const json& event, const char* key) {
  const json& value = event.at(key);
  if (value.is_number_unsigned() ? std::in_range<Integer>(value.get<std::uint64_t>())
                                 : value.is_number_integer() && std::in_range<Integer>(value.get<std::int64_t>()))
    return static_cast<Integer>(value.get<std::int64_t>());
  throw json::other_error::create(0, fmt::format("{} is {}", key, value.dump()), nullptr);
}

Span span_of(const json& event) {
  const double begin = number(event, "ts");
  return {begin, begin + number(event, "dur")};
}

/// Assembles rank 0's events into steps. A step is a backward and the last forward that begins before it.
class Timeline {
 public:
  void add(const json& event) {
    if (event.value("ph", "") != "X") return;
    const int rank = integer<int>(event, "pid");
    ranks_.insert(rank);
    if (rank != 0) return;
    const auto name = event.at("name").get<std::string>();
    const int track = integer<int>(event, "tid");
    if (track == 0 && name == "forward") forwards_.push_back(span_of(event));
    if (track == 0 && name == "backward")
      backwards_.emplace_back(integer<std::int64_t>(event.at("args"), "step"), span_of(event));
    if (track > 0 && name.starts_with("bucket ")) {
      const json& details = event.at("args");
      buckets_[integer<std::int64_t>(details, "step")].emplace(
          track, scaling::BucketProfile{.ready_us = number(event, "ts"), .bytes = number(details, "bytes")});
    }
  }

  scaling::StepProfile profile() const {
    std::vector<Step> steps;
    auto forwards = forwards_;
    std::sort(forwards.begin(), forwards.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
    for (const auto& [number, backward] : backwards_) {
      const auto after = std::upper_bound(forwards.begin(), forwards.end(), backward.begin,
                                          [](double begin, const Span& forward) { return begin < forward.begin; });
      const auto buckets = buckets_.find(number);
      if (after != forwards.begin() && buckets != buckets_.end())
        steps.push_back({*std::prev(after), backward, buckets->second});
    }
    std::sort(steps.begin(), steps.end(),
              [](const Step& a, const Step& b) { return a.backward.begin < b.backward.begin; });
    const std::size_t warmup = std::max<std::size_t>(3, steps.size() / 10);
    // A step ends where the next one begins, so the last step is incomplete.
    if (steps.size() < warmup + kFewest + 1)
      throw InvalidArgument(fmt::format("it holds {} steps of rank 0, but {} are needed: run longer", steps.size(),
                                        warmup + kFewest + 1));
    steps.erase(steps.begin(), steps.begin() + static_cast<std::ptrdiff_t>(warmup));
    return profile_of(steps);
  }

 private:
  scaling::StepProfile profile_of(const std::vector<Step>& steps) const {
    std::vector<double> forward, backward, period;
    std::map<int, std::vector<double>> ready;
    for (std::size_t i = 0; i + 1 < steps.size(); ++i) {
      const Step& step = steps[i];
      double last = step.backward.begin;
      for (const auto& [track, bucket] : step.buckets) {
        last = std::max(last, bucket.ready_us);
        ready[track].push_back(bucket.ready_us - step.backward.begin);
      }
      forward.push_back(step.backward.begin - step.forward.begin);  // Includes the loss.
      backward.push_back((ranks_.size() > 1 ? last : step.backward.end) - step.backward.begin);
      const double waited = ranks_.size() > 1 ? step.backward.end - last : 0;
      period.push_back(steps[i + 1].forward.begin - step.forward.begin - waited);
    }
    scaling::StepProfile profile{.forward_us = median(forward), .backward_us = median(backward), .steps_us = period};
    profile.other_us = std::max(0.0, median(period) - profile.forward_us - profile.backward_us);
    for (const auto& [track, bucket] : steps.back().buckets) {
      if (ready[track].empty())
        throw InvalidArgument(
            fmt::format("its last step has a bucket on track {}, which no step before it has", track));
      profile.buckets.push_back({.ready_us = std::max(0.0, median(ready[track])), .bytes = bucket.bytes});
    }
    return profile;
  }

  std::set<int> ranks_;
  std::vector<Span> forwards_;
  std::vector<std::pair<std::int64_t, Span>> backwards_;  ///< With the step's number.
  std::map<std::int64_t, std::map<int, scaling::BucketProfile>> buckets_;
};

}  // namespace

scaling::StepProfile read_profile(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw InvalidArgument(fmt::format("{}: cannot be read", path));
  try {
    const json document = json::parse(file);
    Timeline timeline;
    for (const json& event : document.is_array() ? document : document.at("traceEvents")) timeline.add(event);
    return timeline.profile();
  } catch (const json::exception& error) {
    throw InvalidArgument(fmt::format("{}: is no timeline of ddpkit: {}", path, error.what()));
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(fmt::format("{}: {}", path, error.what()));
  }
}

}  // namespace ddpkit::cli
