// Prints the indices of one DistributedSampler, one line an epoch, for comparison with Python's.
// Arguments: size world_size rank seed shuffle(0|1) drop_last(0|1) epochs
#include <cstdlib>
#include <iostream>

#include <ddpkit/data/distributed_sampler.h>

int main(int argc, char** argv) {
  if (argc != 8) return 2;
  const auto number = [&](int index) { return std::strtoull(argv[index], nullptr, 10); };
  ddpkit::DistributedSampler sampler(
      number(1), static_cast<int>(number(2)), static_cast<int>(number(3)),
      {.shuffle = number(5) != 0, .seed = number(4), .drop_last = number(6) != 0});
  for (std::uint64_t epoch = 0; epoch < number(7); ++epoch) {
    sampler.set_epoch(epoch);
    sampler.reset();
    // By next(), as a data loader reads it.
    while (const auto batch = sampler.next(7)) {
      for (const auto index : *batch) std::cout << index << ' ';
    }
    std::cout << '\n';
  }
}
