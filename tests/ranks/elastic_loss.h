// The loss of a rank in tests of elastic groups.
#pragma once

#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include <ddpkit/optim/elastic.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/sharded_optimizer.h>

#include "support/catch.h"

namespace ddpkit::testing {

struct ElasticSetting {
  std::string backend;
  bool sharded = false;  ///< The optimizer.
};

[[noreturn]] inline void die() {
  ::kill(::getpid(), SIGKILL);
  std::abort();
}

/// Writes the bytes of the values, for comparisons.
inline void write_bytes(std::ostream& stream, const std::vector<at::Tensor>& values) {
  for (const at::Tensor& value : values) {
    const at::Tensor dense = value.detach().contiguous();
    stream.write(static_cast<const char*>(dense.const_data_ptr()), static_cast<std::streamsize>(dense.nbytes()));
  }
}

/// Returns an Adam optimizer, of which each rank has the whole state or its shards.
inline std::unique_ptr<torch::optim::Optimizer> make_adam(DistributedDataParallelBase& ddp,
                                                          const std::vector<at::Tensor>& parameters, bool sharded) {
  const torch::optim::AdamOptions options(0.01);
  if (sharded) return std::make_unique<optim::ShardedOptimizer<optim::FusedAdam>>(ddp, options);
  return std::make_unique<optim::FusedAdam>(parameters, options);
}

/// One rank, for which `is_lost` is true, is lost in the second update of one step.
template <class M>
void check_torn_step(DistributedDataParallel<M>& ddp, ResumableSampler& sampler, const at::Tensor& inputs,
                     bool is_lost) {
  torch::optim::SGD optimizer(ddp.module().parameters(), torch::optim::SGDOptions(0.1));
  optim::Elastic elastic(ddp, sampler);
  const auto update = [&] {
    optimizer.zero_grad();
    ddp(inputs).sum().backward();
    optimizer.step();
  };
  CHECK(elastic.step(4, update));
  if (is_lost) {
    update();
    die();
  }
  CHECK_THROWS_WITH(elastic.step(4,
                                 [&] {
                                   update();
                                   update();
                                 }),
                    ContainsSubstring("had changed weights"));
}

}  // namespace ddpkit::testing
