#include "har/generate.h"

#include <array>
#include <cmath>
#include <iterator>
#include <numbers>
#include <random>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/train/atomic_file.h>
#include <ddpkit/train/random.h>

#include "har/ucihar.h"
#include "new_folder.h"

namespace har {
namespace {

using ddpkit::train::Random;
using ddpkit::train::write_text;

namespace fs = std::filesystem;

constexpr double kSamplesPerSecond = 50;

struct Activity {
  const char* name;
  double frequency;               // Step frequency, Hz.
  std::array<double, 3> moves;    // Amplitude of the body's acceleration, g. [axis]
  std::array<double, 3> gravity;  // Direction of gravity at the sensor, g. [axis]
};

constexpr std::array<Activity, 6> kActivities = {{
    {"WALKING", 1.9, {0.25, 0.15, 0.15}, {0.97, -0.20, 0.10}},
    {"WALKING_UPSTAIRS", 1.4, {0.22, 0.25, 0.10}, {0.93, -0.28, 0.20}},
    {"WALKING_DOWNSTAIRS", 2.4, {0.45, 0.20, 0.25}, {0.96, -0.15, 0.02}},
    {"SITTING", 0.3, {0.01, 0.01, 0.01}, {0.85, 0.25, 0.45}},
    {"STANDING", 0.3, {0.02, 0.01, 0.01}, {1.00, -0.10, 0.00}},
    {"LAYING", 0.2, {0.01, 0.01, 0.02}, {-0.20, 0.75, 0.60}},
}};

using Window = std::array<std::vector<double>, kUciSignals.size()>;  // [signal][step]

Window make_window(const Activity& activity, int steps, Random& random) {
  const double frequency = activity.frequency * random.uniform(0.92, 1.08);
  const double strength = random.uniform(0.8, 1.2);
  const double phase = random.uniform(0, 2 * std::numbers::pi);
  Window window;
  for (std::size_t axis = 0; axis < 3; ++axis) {
    const double amplitude = activity.moves[axis] * strength;
    const double lag = phase + 0.7 * static_cast<double>(axis);
    const double tilt = activity.gravity[axis] + random.normal(0.04);
    for (int step = 0; step < steps; ++step) {
      const double angle = 2 * std::numbers::pi * frequency * step / kSamplesPerSecond + lag;
      const double body = amplitude * (std::sin(angle) + 0.4 * std::sin(2 * angle)) + random.normal(0.02);
      window[axis].push_back(body);
      window[3 + axis].push_back(3 * amplitude * std::cos(angle) + random.normal(0.05));
      window[6 + axis].push_back(body + tilt);
    }
  }
  return window;
}

void write_split(const fs::path& root, const std::string& name, int windows, int first_subject, int subjects, int steps,
                 Random& random) {
  fs::create_directories(root / name / "Inertial Signals");
  std::array<std::string, kUciSignals.size()> signals;
  std::string labels;
  std::string who;
  for (int i = 0; i < windows; ++i) {
    const std::size_t activity = static_cast<std::size_t>(i) % kActivities.size();
    const Window window = make_window(kActivities[activity], steps, random);
    for (std::size_t signal = 0; signal < signals.size(); ++signal) {
      for (const double value : window[signal]) fmt::format_to(std::back_inserter(signals[signal]), " {:.6e}", value);
      signals[signal] += '\n';
    }
    labels += fmt::format("{}\n", activity + 1);
    who += fmt::format("{}\n", first_subject + i * subjects / windows);
  }
  for (std::size_t signal = 0; signal < signals.size(); ++signal) {
    write_text(root / name / "Inertial Signals" / fmt::format("{}_{}.txt", kUciSignals[signal], name), signals[signal]);
  }
  write_text(root / name / fmt::format("y_{}.txt", name), labels);
  write_text(root / name / fmt::format("subject_{}.txt", name), who);
}

}  // namespace

void generate_ucihar(const fs::path& folder, const GenerateOptions& options) {
  if (options.train < 1 || options.test < 1 || options.steps < 1) {
    throw ddpkit::InvalidArgument(
        fmt::format("cannot generate {} training and {} test windows of {} steps: each must be at least 1",
                    options.train, options.test, options.steps));
  }
  write_new_folder(folder, [&](const fs::path& path) {
    Random random(options.seed);
    write_split(path, "train", options.train, 1, 21, options.steps, random);
    write_split(path, "test", options.test, 22, 9, options.steps, random);
    std::string names;
    for (std::size_t i = 0; i < kActivities.size(); ++i) names += fmt::format("{} {}\n", i + 1, kActivities[i].name);
    write_text(path / "activity_labels.txt", names);
  });
}

}  // namespace har
