// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <optional>
#include <thread>

namespace ddpkit {

/// How much of an epoch the model has trained on, as a sampler saves it. A loader may have fetched more. Units are the
/// sampler's: samples or batches.
class EpochPosition {
 public:
  /// `begin`: trained on before.
  explicit EpochPosition(std::size_t begin = 0) noexcept : dealt_(begin) {}

  std::size_t dealt() const noexcept { return dealt_; }
  /// next() returned `count` more. They count as trained on until set() is called.
  void deal(std::size_t count) noexcept;
  /// The caller has received the whole epoch at once. The position is unknown until next() or set() is called.
  void hand_out() const noexcept;
  /// The model has trained on `trained`; empty: unknown.
  void set(std::optional<std::size_t> trained) noexcept;

  /// The last known value.
  std::size_t last() const noexcept { return is_set_ ? trained_.value_or(dealt_) : dealt_; }
  /// Throws InvalidArgument where it is unknown, or where another thread has moved it, which may be ahead of the
  /// training.
  std::size_t trained() const;

 private:
  std::size_t dealt_;
  bool is_set_ = false;
  std::optional<std::size_t> trained_;
  std::thread::id thread_;              ///< Of the last next() or set().
  mutable bool is_handed_out_ = false;  ///< Accessed atomically: const functions set it, on any thread.
};

}  // namespace ddpkit
