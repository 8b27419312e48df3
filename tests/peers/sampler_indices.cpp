// Prints the indices of DistributedSamplers, one line per epoch, for comparison with Python's. Each line of stdin
// describes one sampler: size world_size rank seed shuffle(0|1) drop_last(0|1) epochs
#include <iostream>

#include <ddpkit/data/distributed_sampler.h>

int main() {
  std::size_t size = 0;
  std::uint64_t seed = 0, epochs = 0;
  int world_size = 0, rank = 0;
  bool shuffle = false, drop_last = false;
  while (std::cin >> size >> world_size >> rank >> seed >> shuffle >> drop_last >> epochs) {
    ddpkit::DistributedSampler sampler(size, world_size, rank,
                                       {.shuffle = shuffle, .seed = seed, .drop_last = drop_last});
    for (std::uint64_t epoch = 0; epoch < epochs; ++epoch) {
      sampler.set_epoch(epoch);
      sampler.reset();
      // With next(), as a data loader reads it.
      while (const auto batch = sampler.next(7)) {
        for (const auto index : *batch) std::cout << index << ' ';
      }
      std::cout << '\n';
    }
  }
}
