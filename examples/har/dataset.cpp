#include "har/dataset.h"

#include <ATen/ATen.h>

#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "har/ts_format.h"
#include "har/ucihar.h"

namespace har {
namespace {

struct Scale {
  double mean = 0;
  double deviation = 1;
};

Scale scale_of(const Recordings& split, std::size_t channel) {
  const auto each = [&](auto&& visit) {
    for (std::size_t window = 0; window < split.windows(); ++window) {
      const float* values = split.values.data() + (window * split.channels + channel) * split.steps;
      for (std::size_t step = 0; step < split.steps; ++step) {
        if (!std::isnan(values[step])) visit(static_cast<double>(values[step]));
      }
    }
  };
  double sum = 0;
  double count = 0;
  each([&](double value) { sum += value, count += 1; });
  if (count == 0) return {};
  Scale scale{.mean = sum / count, .deviation = 1};
  double squares = 0;
  each([&](double value) { squares += (value - scale.mean) * (value - scale.mean); });
  const double deviation = std::sqrt(squares / count);
  // Does not scale the rounding errors of a constant channel.
  if (deviation > 1e-6 * std::max(1.0, std::abs(scale.mean))) scale.deviation = deviation;
  return scale;
}

Split to_split(const Recordings& split, const std::vector<Scale>& scales) {
  const auto windows = static_cast<std::int64_t>(split.windows());
  Split result{
      .windows = at::empty({windows, static_cast<std::int64_t>(split.channels), static_cast<std::int64_t>(split.steps)},
                           at::kFloat),
      .labels = at::empty({windows}, at::kLong)};
  std::memcpy(result.labels.mutable_data_ptr(), split.labels.data(), split.labels.size() * sizeof(split.labels[0]));
  float* out = result.windows.mutable_data_ptr<float>();
  for (std::size_t i = 0; i < split.values.size(); ++i) {
    const Scale& scale = scales[i / split.steps % split.channels];
    const float value = split.values[i];
    out[i] = std::isnan(value) ? 0.0F : static_cast<float>((value - scale.mean) / scale.deviation);
  }
  return result;
}

}  // namespace

RecordingSet read_recordings(const std::filesystem::path& folder) {
  std::error_code error;
  if (!std::filesystem::exists(folder, error)) {
    throw ddpkit::InvalidArgument(fmt::format("there is no data folder {}", folder.string()));
  }
  if (!std::filesystem::is_directory(folder, error)) {
    throw ddpkit::InvalidArgument(fmt::format("{} is not a folder", folder.string()));
  }
  const auto ts_problem = find_ts_problem(folder);
  if (is_ucihar(folder)) {
    if (ts_problem)
      throw ddpkit::InvalidArgument(fmt::format("{} holds the UCI-HAR layout and {}_TRAIN.ts: give each its own folder",
                                                folder.string(), *ts_problem));
    return read_ucihar(folder);
  }
  if (ts_problem) return read_ts(folder, *ts_problem);
  throw ddpkit::InvalidArgument(
      fmt::format("{} has neither the UCI-HAR layout (train/Inertial Signals/) nor NAME_TRAIN.ts and NAME_TEST.ts",
                  folder.string()));
}

Dataset normalised(const RecordingSet& recordings) {
  std::vector<Scale> scales;
  for (std::size_t channel = 0; channel < recordings.train.channels; ++channel) {
    scales.push_back(scale_of(recordings.train, channel));
  }
  return {.name = recordings.name,
          .class_names = recordings.class_names,
          .train = to_split(recordings.train, scales),
          .test = to_split(recordings.test, scales)};
}

}  // namespace har
