// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <optional>
#include <thread>

namespace ddpkit {

/// The position in an epoch up to which the model has trained, as a sampler saves it. A loader may have fetched more.
/// The unit is that of the sampler: samples or batches.
class EpochPosition {
 public:
  /// `begin`: position at which training starts.
  explicit EpochPosition(std::size_t begin = 0) noexcept : dealt_(begin) {}

  std::size_t dealt() const noexcept { return dealt_; }  ///< Position up to which next() has returned.
  /// Adds `count` that next() has returned. They count as trained on until set() is called.
  void deal(std::size_t count) noexcept;
  /// Records that the caller received the whole epoch at once. The position is unknown until next() or set() is called.
  void hand_out() const noexcept;
  /// Sets the position up to which the model has trained. Empty: unknown.
  void set(std::optional<std::size_t> trained) noexcept;

  /// Returns the last known position.
  std::size_t last() const noexcept { return is_set_ ? trained_.value_or(dealt_) : dealt_; }
  /// Returns the position. Throws InvalidArgument if the position is unknown, or if another thread has changed it,
  /// because that thread may be ahead of the training.
  std::size_t trained() const;

 private:
  std::size_t dealt_;
  bool is_set_ = false;
  std::optional<std::size_t> trained_;
  std::thread::id thread_;              ///< Thread of the last next() or set().
  mutable bool is_handed_out_ = false;  ///< Accessed atomically: const functions set it on any thread.
};

}  // namespace ddpkit
