#include <ddpkit/train/seed.h>

#include <initializer_list>

namespace ddpkit::train {

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

}  // namespace ddpkit::train
