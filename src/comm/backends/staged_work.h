// Tier 2: c10d's Work.hpp.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <vector>

#include "comm/backends/staging.h"

namespace ddpkit {

/// One staged collective: for its caller a c10d::Work, for the group's thread the collective to run.
class StagedWork : public c10d::Work {
 public:
  using Tensors = std::vector<at::Tensor>;
  /// Runs the collective on host memory and blocks until it has ended.
  using Collective = std::function<void(Tensors& host)>;

  StagedWork(int rank, c10d::OpType type, Collective collective, Tensors host);

  bool isCompleted() override;
  std::vector<at::Tensor> result() override { return outputs_; }
  /// Blocks the host until the host's part of the collective has ended, then makes the current stream wait for the copy
  /// to the device, as c10d's gloo backend does. Ignores `timeout`: the group's timeout applies.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }

 private:
  friend class StagedBackend;
  Collective collective_;
  std::shared_ptr<StagingQueue::Mark> ready_;  ///< From then on, the caller's stream has written the inputs.
  StagingQueue::Copies in_, out_;              ///< To the host, and to the device.
  Tensors host_;                               ///< [part]
  Tensors outputs_;                            ///< On the device. [part that is an output]
  std::shared_ptr<StagingQueue::Mark> done_;
};

}  // namespace ddpkit
