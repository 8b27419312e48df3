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

namespace ddpkit::optim {

/// The parts of Elastic that a loop without closures needs, such as train::Epoch.
class Elastic::Impl {
 public:
  Impl(DistributedDataParallelBase& ddp, torch::nn::Module& module, ResumableSampler& sampler, ElasticOptions options);
  static Impl& of(const Elastic& elastic) noexcept { return *elastic.impl_; }

  /// Saves the state. recover() undoes all changes until end().
  void begin();
  /// Keeps the changes since begin().
  void end() noexcept { undoes_ = false; }
  /// Counts a complete step with `samples` samples of this rank.
  void add_step(std::size_t samples);
  /// Continues without lost ranks. `cause`: the text of the error.
  void recover(std::string cause);

  DistributedDataParallelBase& ddp;
  ResumableSampler& sampler;
  std::int64_t steps = 0;
  bool interrupted = false;
  struct Part {
    std::function<void()> save, roll_back;
  };
  std::vector<Part> parts;

 private:
  std::size_t fingerprint() const;
  void roll_back();
  void check_steps() const;

  const ElasticOptions options_;
  std::vector<at::Tensor> parameters_, buffers_;
  bool undoes_ = false;                    ///< Between begin() and end().
  std::size_t fingerprint_ = 0;            ///< Before the step.
  std::vector<at::Tensor> saved_buffers_;  ///< Values before the step. [buffer]
  std::vector<at::Generator> generators_;  ///< Default generators of the CPU and of the group's device.
  std::vector<at::Tensor> random_states_;  ///< Before the step. [generator]
};

}  // namespace ddpkit::optim
