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
  std::string label = {};      ///< In front of the bar.
  bool enabled = true;         ///< False on every rank but the one that speaks.
  std::FILE* stream = stderr;  ///< Where the bar goes when it is a terminal; nothing is written when it is not.
  std::chrono::milliseconds interval = std::chrono::milliseconds(100);  ///< Between two drawings.
};

/// A progress bar on the last line of a terminal: "epoch 3/30 [=====>    ] 12/25 loss 0.41". Costs a clock reading a
/// step when nothing is due.
class ProgressBar {
 public:
  /// `total` steps.
  explicit ProgressBar(std::int64_t total, ProgressOptions options = {});
  /// Clears the line.
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// One step done. `note` is asked for what to put behind the bar only when the bar is about to be drawn.
  void advance(const std::function<std::string()>& note = nullptr);

  /// Takes the bar off the terminal, so that a line can be printed in its place.
  void clear() noexcept;

 private:
  void draw(const std::string& note);

  ProgressOptions options_;
  std::int64_t total_;
  std::int64_t done_ = 0;
  bool visible_;        // The stream is a terminal that can redraw a line.
  bool drawn_ = false;  // There is something to clear.
  std::chrono::steady_clock::time_point next_drawing_;
};

}  // namespace ddpkit::train
