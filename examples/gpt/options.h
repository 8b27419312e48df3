// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <string>

#include <ddpkit/train/run_options.h>

namespace gpt {

/// What each rank keeps only a shard of.
enum class Sharding {
  kNone,   ///< Nothing: ddpkit::DistributedDataParallel.
  kZero2,  ///< Gradients and optimizer state: ddpkit::optim::ShardedOptimizer.
  kFsdp,   ///< Weights too: ddpkit::FullyShardedDataParallel.
};

/// The options of `gpt`.
struct TrainOptions {
  ddpkit::train::RunOptions run = {.epochs = 5, .batch_size = 16, .max_grad_norm = 1};
  std::string data = "/usr/share/common-licenses";  ///< A text file, or a folder of them.

  std::int64_t layers = 4;
  std::int64_t width = 128;
  std::int64_t heads = 4;
  std::int64_t context = 128;  ///< Characters that the model sees.
  double dropout = 0;

  Sharding sharding = Sharding::kNone;
  bool activation_checkpointing = false;

  std::string prompt = "The ";    ///< Start of the text that is written after the training.
  std::int64_t characters = 200;  ///< Length of this text; 0: none.
  double temperature = 0.8;
};

/// Declares all options. `gpt` must outlive the parse.
void declare(ddpkit::train::Options& options, TrainOptions& gpt);

}  // namespace gpt
