// Tier 2: torch/optim/optimizer.h and ddpkit/parallel/distributed_data_parallel.h.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <type_traits>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/parallel/join.h>

namespace ddpkit::optim {

/// State that a rank keeps by itself and changes in each step: optimizers that are not sharded, learning-rate
/// schedulers. A rank whose inputs have ended takes no more steps, so its state falls behind. At the
/// end of join() all ranks take the state of a rank that ran to the last.
///
///     ddpkit::optim::JoinState state(ddp, optimizer, scheduler);
///     ddpkit::join({ddp, state}, [&] { ... });
///
/// Pass all of them except optimizers without state (SGD without momentum at a constant rate): otherwise the ranks'
/// weights differ after the next step. A ShardedOptimizer is passed to join() itself.
class JoinState final : public Joinable {
 public:
  /// `objects`: optimizers, and anything with save(OutputArchive&) and load(InputArchive&); the same on all ranks. They
  /// outlive this. Throws InvalidArgument for a ShardedOptimizer, and for an optimizer of parameters that `ddp` does
  /// not average: each rank has its own state of them.
  template <class... Objects>
  explicit JoinState(const DistributedDataParallelBase& ddp, Objects&... objects) : group_(ddp.group()) {
    (add(ddp, objects), ...);
  }

  const ProcessGroup& join_group() const override { return group_; }
  void join_begin(JoinSession&, int) override {}
  void join_shadow(int) override {}
  /// Broadcasts the archives of all objects.
  void join_end(int source) override;

 private:
  struct Part {
    std::function<void(torch::serialize::OutputArchive&)> save;
    std::function<void(torch::serialize::InputArchive&)> load;
  };

  void add(const DistributedDataParallelBase& ddp, torch::optim::Optimizer& optimizer);
  template <class T>
  void add(const DistributedDataParallelBase& ddp, T& object) {
    if constexpr (std::is_base_of_v<torch::optim::Optimizer, T>) {
      add(ddp, static_cast<torch::optim::Optimizer&>(object));
    } else {
      parts_.push_back({.save = [&object](torch::serialize::OutputArchive& archive) { object.save(archive); },
                        .load = [&object](torch::serialize::InputArchive& archive) { object.load(archive); }});
    }
  }

  ProcessGroup group_;
  std::vector<Part> parts_;
};

}  // namespace ddpkit::optim
