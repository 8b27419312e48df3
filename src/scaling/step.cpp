#include <ddpkit/scaling/step.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include <fmt/format.h>

namespace ddpkit::scaling {
namespace {

/// Limit of the number of buckets that are simulated one by one.
constexpr double kMostBuckets = 1e6;

/// Quantile of `values`, with linear interpolation.
double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  const double at = q * static_cast<double>(values.size() - 1);
  const auto low = static_cast<std::size_t>(at);
  const std::size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - static_cast<double>(low)) * (values[high] - values[low]);
}

double check(double value, const char* name) {
  if (!std::isfinite(value) || value < 0) throw std::invalid_argument(fmt::format("{} is {}", name, value));
  return value;
}

}  // namespace

StepProfile assume_step(const AssumedStep& step) {
  if (check(step.backward_share, "the share of backward") > 1)
    throw std::invalid_argument(fmt::format("the share of backward is {}", step.backward_share));
  if (check(step.bucket_bytes, "the bucket's size") == 0 ||
      check(step.first_bucket_bytes, "the first bucket's size") == 0)
    throw std::invalid_argument("a bucket holds nothing");
  StepProfile profile;
  profile.backward_us = check(step.compute_us, "the compute time") * step.backward_share;
  profile.forward_us = step.compute_us - profile.backward_us;
  profile.other_us = check(step.other_us, "the time of the update");
  const double total = check(step.parameter_bytes, "the parameters' size");
  const double buckets = 1 + std::max(0.0, (total - step.first_bucket_bytes) / step.bucket_bytes);
  if (buckets > kMostBuckets)
    throw std::invalid_argument(
        fmt::format("parameters of {:.3g} bytes take {:.3g} buckets of {:.3g} bytes: at most {:.0f} are looked at one "
                    "by one, so take larger buckets",
                    total, buckets, step.bucket_bytes, kMostBuckets));
  for (double done = 0; done < total;) {
    const double cap = profile.buckets.empty() ? step.first_bucket_bytes : step.bucket_bytes;
    const double bytes = std::min(cap, total - done);
    done += bytes;
    profile.buckets.push_back({.ready_us = profile.backward_us * done / total, .bytes = bytes});
  }
  return profile;
}

StepPrediction predict_step(const StepProfile& profile, const AllReduceModel& all_reduce, int ranks,
                            const StepOptions& options) {
  if (ranks < 1) throw std::invalid_argument(fmt::format("{} ranks", ranks));
  if (options.contention < 1) throw std::invalid_argument(fmt::format("a contention of {}", options.contention));
  const double compute = options.fixed_global_batch ? 1.0 / ranks : 1;
  const double backward_us = compute * profile.backward_us;
  StepPrediction prediction;
  double end = 0, largest = 0, first_us = 0;
  for (const BucketProfile& bucket : profile.buckets) {
    const AllReduceTime time = all_reduce(bucket.bytes, ranks);
    prediction.communication_us += time.us;
    first_us = time.us;  // Forward begins with the unit whose gradient comes last.
    end = std::max(end, compute * bucket.ready_us) + time.us;
    if (bucket.bytes > largest) {
      largest = bucket.bytes;
      prediction.algorithm = time.algorithm;
    }
  }
  const double forward_us = compute * profile.forward_us;
  const double gathers_us = options.fully_sharded ? prediction.communication_us / 2 : 0;
  prediction.communication_us += gathers_us;
  if (!options.overlap) {
    prediction.exposed_us = prediction.communication_us;
  } else {
    const double exposed_gathers_us = std::min(gathers_us, std::max(first_us / 2, gathers_us - forward_us));
    prediction.exposed_us = std::max(0.0, end - backward_us) + exposed_gathers_us;
    const double hidden = std::max(0.0, prediction.communication_us - prediction.exposed_us);
    const double overlapped_us = options.fully_sharded ? forward_us + backward_us : backward_us;
    prediction.contention_us = (options.contention - 1) * std::min(hidden, overlapped_us);
  }
  if (options.stragglers && ranks > 1 && !profile.steps_us.empty())
    prediction.straggler_us =
        compute * (quantile(profile.steps_us, std::pow(.5, 1.0 / ranks)) - quantile(profile.steps_us, .5));
  const double other_us = options.sharded_update || options.fully_sharded ? profile.other_us / ranks : profile.other_us;
  prediction.us =
      forward_us + backward_us + other_us + prediction.exposed_us + prediction.contention_us + prediction.straggler_us;
  return prediction;
}

}  // namespace ddpkit::scaling
