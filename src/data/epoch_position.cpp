#include <ddpkit/data/epoch_position.h>

#include <algorithm>
#include <atomic>

#include <ddpkit/error.h>

namespace ddpkit {

void EpochPosition::deal(std::size_t count) noexcept {
  dealt_ += count;
  thread_ = std::this_thread::get_id();
}

void EpochPosition::hand_out() const noexcept {
  std::atomic_ref(is_handed_out_).store(true, std::memory_order_relaxed);
}

void EpochPosition::set(std::optional<std::size_t> trained) noexcept {
  is_set_ = true;
  trained_ = trained;
  dealt_ = std::max(dealt_, trained.value_or(0));
  thread_ = std::this_thread::get_id();
}

std::size_t EpochPosition::trained() const {
  constexpr const char* kRemedy = "call set_position() before save(), or set_epoch() after the epoch";
  const bool has_moved = thread_ != std::thread::id();
  if (is_set_ && !trained_)
    throw InvalidArgument(
        std::string("the sampler cannot be saved within the epoch: the data loader delivers batches in any order "
                    "(enforce_ordering is false), so no position describes them; ") +
        kRemedy);
  if (!has_moved && std::atomic_ref(is_handed_out_).load(std::memory_order_relaxed))
    throw InvalidArgument(
        std::string("the sampler cannot be saved: the whole epoch was taken from it at once, and it does not know how "
                    "much of it the model has trained on; ") +
        kRemedy);
  if (has_moved && thread_ != std::this_thread::get_id())
    throw InvalidArgument(
        std::string("the sampler cannot be saved: another thread has taken its samples, and may be ahead of the "
                    "training; ") +
        kRemedy);
  return last();
}

}  // namespace ddpkit
