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

/// Synchronizes state that each rank keeps separately and changes in each step: optimizers that are not sharded, and
/// learning-rate schedulers. A rank whose inputs have ended takes no more steps, so its state is outdated. At the end
/// of join(), all ranks load the state of a rank that took all steps.
///
///     ddpkit::optim::JoinState state(ddp, optimizer, scheduler);
///     ddpkit::join({ddp, state}, [&] { ... });
///
/// Pass all such objects, except optimizers without state (SGD without momentum at a constant rate). Otherwise the
/// ranks' weights differ after the next step. Pass a ShardedOptimizer directly to join().
class JoinState final : public Joinable {
 public:
  /// Collective. `objects`: optimizers, and objects with save(OutputArchive&) and load(InputArchive&); the same on all
  /// ranks. They must outlive this object. Throws InvalidArgument on all ranks if the objects differ between ranks, for
  /// a ShardedOptimizer, and for an optimizer with parameters that `ddp` does not average, because their state differs
  /// between ranks.
  template <class... Objects>
  explicit JoinState(const DistributedDataParallelBase& ddp, Objects&... objects) : group_(ddp.group()) {
    (add(objects), ...);
    check(ddp);
  }

  const ProcessGroup& join_group() const override { return group_; }

 private:
  friend class Elastic;  // New ranks load the state of the others.

  void join_end(int source) override;
  /// The last `new_ranks` ranks load the state of former ranks.
  void copy_to_new(int new_ranks);
  /// `saves`: `transfer` sends this rank's objects: an archive, and then the tensors of the optimizers. `loads`: this
  /// rank loads what it receives. If one rank cannot save or load an object, all ranks throw.
  void copy(bool saves, bool loads, const std::function<void(const at::Tensor&)>& transfer);

  struct Part {
    std::function<void(torch::serialize::OutputArchive&)> save;
    std::function<void(torch::serialize::InputArchive&)> load;
    const std::type_info* type;
    torch::optim::Optimizer* optimizer = nullptr;
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
  /// Does what the others would wait for when a new rank joins: LibTorch takes 0.1 s for a process's first archives,
  /// and the system allocates the pages of the optimizers' state.
  void prepare() const;
  std::string save() const;
  std::vector<torch::serialize::InputArchive> read(const std::string& bytes) const;  ///< [part]

  ProcessGroup group_;
  std::vector<Part> parts_;
};

}  // namespace ddpkit::optim
