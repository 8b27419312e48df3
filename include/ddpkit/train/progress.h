// Tier 0: the standard library only.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>

namespace ddpkit::train {

/// Returns whether the locale in the environment is UTF-8.
bool has_utf8();

/// Options of ProgressBar.
struct ProgressOptions {
  std::string label = {};     ///< Text before the bar.
  std::string unit = {};      ///< Name of the items that the rate counts: "clips". Empty: no rate.
  double items_per_step = 1;  ///< Items of all ranks in a step.
  std::int64_t later_steps =
      0;                       ///< Steps of the run after this bar; above 0, the bar also shows the time left for all.
  bool enabled = true;         ///< False: write nothing. Set it to true on one rank only.
  bool heartbeat = false;      ///< True: without a terminal, write a line after 10 s and then every 30 s.
  std::FILE* stream = stderr;  ///< Output. A bar needs a terminal.
  std::chrono::milliseconds interval = std::chrono::milliseconds(100);   ///< Minimum time between two drawings.
  std::chrono::milliseconds first_heartbeat = std::chrono::seconds(10);  ///< Time to the first line.
  std::chrono::milliseconds next_heartbeat = std::chrono::seconds(30);   ///< Time from line to line.
};

/// The progress of a loop, on the last line of a terminal:
///
///     Epoch 1/30 Training:  67%|██████▋   | 12/18 [00:16<00:08, 31.9 clips/s, loss=0.4521]
///
/// Shows the time so far, the time left, the rate and a note. Without a terminal, it is a line from time to time,
/// without the bar. Reads the clock once per step.
class ProgressBar {
 public:
  /// `total`: number of steps.
  explicit ProgressBar(std::int64_t total, ProgressOptions options = {});
  /// Clears the line.
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// Counts one step. `note` returns the last part of the text; it is called only when the text is written.
  void advance(const std::function<std::string()>& note = nullptr);

  /// Clears the bar, so that a line can be printed.
  void clear() noexcept;

 private:
  enum class Kind { kNone, kBar, kLines };

  void draw(const std::string& note, std::chrono::steady_clock::time_point now);

  ProgressOptions options_;
  std::int64_t total_;
  std::int64_t done_ = 0;
  Kind kind_ = Kind::kNone;
  bool drawn_ = false;  // The bar is on the terminal.
  std::chrono::steady_clock::time_point start_, next_drawing_;
};

}  // namespace ddpkit::train
