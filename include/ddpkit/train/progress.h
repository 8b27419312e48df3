// Tier 0: the standard library only.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>

namespace ddpkit::train {

/// Options of ProgressBar.
struct ProgressOptions {
  std::string label = {};      ///< Text before the bar.
  bool enabled = true;         ///< False: draw nothing. Set it to true on one rank only.
  std::FILE* stream = stderr;  ///< Output if it is a terminal; otherwise nothing is written.
  std::chrono::milliseconds interval = std::chrono::milliseconds(100);  ///< Minimum time between two drawings.
};

/// A progress bar on the last line of a terminal: "epoch 3/30 [=====>    ] 12/25 loss 0.41". Reads the clock once per
/// step.
class ProgressBar {
 public:
  /// `total`: number of steps.
  explicit ProgressBar(std::int64_t total, ProgressOptions options = {});
  /// Clears the line.
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// Counts one step. `note` returns the text after the bar; it is called only when the bar is drawn.
  void advance(const std::function<std::string()>& note = nullptr);

  /// Clears the bar, so that a line can be printed.
  void clear() noexcept;

 private:
  void draw(const std::string& note);

  ProgressOptions options_;
  std::int64_t total_;
  std::int64_t done_ = 0;
  bool visible_;        // The stream is a terminal that supports redrawing.
  bool drawn_ = false;  // The bar is on the terminal.
  std::chrono::steady_clock::time_point next_drawing_;
};

}  // namespace ddpkit::train
