// Tier 2: torch/optim/adamw.h.
#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <memory>
#include <vector>

#include <ddpkit/optim/fused_optimizer.h>

namespace ddpkit::optim {

/// What FusedAdamW and FusedAdam share: LibTorch gives their options and state two types with the same members.
template <class Options, class State, bool kDecoupled>
class FusedAdamFamily : public FusedOptimizer {
 public:
  /// Options as torch::optim's; throws InvalidArgument for values out of their range.
  explicit FusedAdamFamily(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                           const Options& defaults = {}, const FusedOptions& options = {});
  explicit FusedAdamFamily(std::vector<at::Tensor> params, const Options& defaults = {},
                           const FusedOptions& options = {});

  std::unique_ptr<torch::optim::OptimizerParamState> make_state() const override;

 protected:
  std::size_t tensor_count(const torch::optim::OptimizerOptions& options) const override;
  StateTensors tensors_of(const torch::optim::OptimizerParamState& state) const override;
  void set_tensors(torch::optim::OptimizerParamState& state, const StateTensors& tensors) const override;
  void update(const torch::optim::OptimizerOptions& options, std::vector<Update>& updates,
              double gradient_factor) override;
  bool same_options(const torch::optim::OptimizerOptions& a, const torch::optim::OptimizerOptions& b) const override;
  std::int64_t* steps_of(torch::optim::OptimizerParamState& state) const override;
  void write(torch::serialize::OutputArchive& archive) const override;
  void read(torch::serialize::InputArchive& archive) override;
};
extern template class FusedAdamFamily<torch::optim::AdamWOptions, torch::optim::AdamWParamState, true>;
extern template class FusedAdamFamily<torch::optim::AdamOptions, torch::optim::AdamParamState, false>;

/// torch::optim::AdamW in one pass over memory (see FusedOptimizer). Decoupled weight decay, after Loshchilov and
/// Hutter, arXiv 1711.05101; amsgrad after Reddi, Kale and Kumar, arXiv 1904.09237.
///
///     ddpkit::optim::FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3).weight_decay(0.1));
class FusedAdamW final
    : public FusedAdamFamily<torch::optim::AdamWOptions, torch::optim::AdamWParamState, /*kDecoupled=*/true> {
 public:
  using FusedAdamFamily::FusedAdamFamily;
};

/// torch::optim::Adam in one pass over memory: weight decay is added to the gradient, after Kingma and Ba, arXiv
/// 1412.6980.
class FusedAdam final
    : public FusedAdamFamily<torch::optim::AdamOptions, torch::optim::AdamParamState, /*kDecoupled=*/false> {
 public:
  using FusedAdamFamily::FusedAdamFamily;
};

}  // namespace ddpkit::optim
