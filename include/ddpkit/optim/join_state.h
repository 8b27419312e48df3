// Tier 2: torch/optim/optimizer.h and ddpkit/parallel/distributed_data_parallel.h.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <string>
#include <type_traits>
#include <typeinfo>
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
  /// Collective. `objects`: optimizers, and anything with save(OutputArchive&) and load(InputArchive&); the same on all
  /// ranks. They outlive this. Throws InvalidArgument on all ranks for objects that differ between ranks, for a
  /// ShardedOptimizer, and for an optimizer of parameters that `ddp` does not average: each rank has its own state of
  /// them.
  template <class... Objects>
  explicit JoinState(const DistributedDataParallelBase& ddp, Objects&... objects) : group_(ddp.group()) {
    (add(objects), ...);
    check(ddp);
  }

  const ProcessGroup& join_group() const override { return group_; }

 private:
  /// Broadcasts the archives of all objects. An object that a rank cannot save or load is an error on all ranks.
  void join_end(int source) override;

  struct Part {
    std::function<void(torch::serialize::OutputArchive&)> save;
    std::function<void(torch::serialize::InputArchive&)> load;
    const std::type_info* type;
    const torch::optim::Optimizer* optimizer = nullptr;
  };

  void add(torch::optim::Optimizer& optimizer);
  template <class T>
  void add(T& object) {
    if constexpr (std::is_base_of_v<torch::optim::Optimizer, T>) {
      add(static_cast<torch::optim::Optimizer&>(object));
    } else {
      parts_.push_back({.save = [&object](torch::serialize::OutputArchive& archive) { object.save(archive); },
                        .load = [&object](torch::serialize::InputArchive& archive) { object.load(archive); },
                        .type = &typeid(object)});
    }
  }
  /// Collective.
  void check(const DistributedDataParallelBase& ddp) const;
  std::string save() const;

  ProcessGroup group_;
  std::vector<Part> parts_;
};

}  // namespace ddpkit::optim
