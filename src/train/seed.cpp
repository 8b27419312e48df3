#include <ddpkit/train/seed.h>

#include <ATen/Context.h>

#include <initializer_list>
#include <mutex>
#include <utility>

#include "train/generator_seed.h"

namespace ddpkit::train {
namespace {

/// Per process, as the default generators are.
struct Seeds {
  std::mutex mutex;
  std::optional<std::uint64_t> current, restored;
};

Seeds& seeds() {
  static Seeds all;
  return all;
}

}  // namespace

std::uint64_t epoch_seed(std::uint64_t seed, std::int64_t epoch, int rank) noexcept {
  std::uint64_t mixed = seed;
  for (const std::uint64_t part : {static_cast<std::uint64_t>(epoch), static_cast<std::uint64_t>(rank)}) {
    mixed += part + 0x9e3779b97f4a7c15;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
    mixed ^= mixed >> 31;
  }
  return mixed;
}

bool seed_epoch(std::uint64_t seed, std::int64_t epoch, int rank) {
  const std::uint64_t mixed = epoch_seed(seed, epoch, rank);
  const std::lock_guard lock(seeds().mutex);
  const bool is_restored = std::exchange(seeds().restored, std::nullopt) == mixed;
  seeds().current = mixed;
  if (!is_restored) at::manual_seed(mixed);
  return !is_restored;
}

std::optional<std::uint64_t> generator_seed() {
  const std::lock_guard lock(seeds().mutex);
  return seeds().current;
}

void note_restored_generators(std::optional<std::uint64_t> seed) {
  const std::lock_guard lock(seeds().mutex);
  seeds().current = seeds().restored = seed;
}

}  // namespace ddpkit::train
