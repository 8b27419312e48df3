// What the tests of elastic runs share.
#pragma once

#include <chrono>
#include <string>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/train/run_options.h>

namespace ddpkit::testing {

inline ProcessGroup elastic_group(const std::string& backend = "shm") {
  return init_process_group({.backend = backend, .timeout = std::chrono::seconds(60), .elastic = true});
}

inline train::RunOptions elastic_options(int epochs, const std::string& save_dir, std::int64_t save_steps) {
  return {.epochs = epochs,
          .batch_size = 4,
          .lr = 1e-2,
          .lr_scaling = optim::LearningRateScaling::kLinear,
          .amp = false,
          .seed = 5,
          .elastic = true,
          .save_dir = save_dir,
          .save_steps = save_steps,
          .progress = "off"};
}

}  // namespace ddpkit::testing
