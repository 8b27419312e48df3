// Tier 2: ddpkit/optim/elastic.h.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ddpkit/optim/elastic.h>

#include "data/sampling.h"

namespace ddpkit::optim {

/// The parts of Elastic that a loop without closures needs, such as train::Epoch.
class Elastic::Impl {
 public:
  Impl(DistributedDataParallelBase& ddp, torch::nn::Module& module, sampling::Regroupable& sampler,
       ElasticOptions options);
  static Impl& of(const Elastic& elastic) noexcept { return *elastic.impl_; }

  /// Begins a step. If new ranks join before it, throws PeerLost, and recover() lets them join.
  void begin_step();
  /// Saves the state. recover() undoes all changes until end().
  void begin();
  /// Keeps the changes since begin().
  void end() noexcept { undoes_ = false; }
  /// Counts a complete step with `samples` samples of this rank, or batches of a LengthBucketedSampler.
  void add_step(std::size_t samples);
  /// Continues without lost ranks, or with new ones. `cause`: the text of the error.
  void recover(std::string cause);
  /// On a new rank: joins the others.
  void join();

  DistributedDataParallelBase& ddp;
  sampling::Regroupable& sampler;
  std::int64_t steps = 0;
  bool interrupted = false;
  bool takes_new_ranks = false;
  struct Part {
    std::function<void()> save, roll_back;
  };
  std::vector<Part> parts;

  /// The numbers that new ranks get from a former rank.
  struct Progress {
    void save(torch::serialize::OutputArchive& archive) const;
    void load(torch::serialize::InputArchive& archive);
    Impl& of;
  };
  Progress progress{*this};
  JoinState state;  ///< What new ranks get from a former rank, except weights and buffers.

 private:
  std::size_t fingerprint() const;
  void roll_back();
  void check_steps() const;
  /// The part of a change that former and new ranks share. Collective.
  void adapt(const Regroup& change);

  const ElasticOptions options_;
  std::vector<at::Tensor> parameters_, buffers_;
  bool undoes_ = false;                    ///< Between begin() and end().
  bool joins_ = false;                     ///< New ranks join now.
  std::size_t fingerprint_ = 0;            ///< Before the step.
  std::vector<at::Tensor> saved_buffers_;  ///< Values before the step. [buffer]
  std::vector<at::Generator> generators_;  ///< Default generators of the CPU and of the group's device.
  std::vector<at::Tensor> random_states_;  ///< Before the step. [generator]
};

}  // namespace ddpkit::optim
