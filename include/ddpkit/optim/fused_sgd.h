// Tier 2: torch/optim/sgd.h.
#pragma once

#include <torch/optim/sgd.h>

#include <memory>
#include <vector>

#include <ddpkit/optim/fused_optimizer.h>

namespace ddpkit::optim {

/// torch::optim::SGD in one pass over memory (see FusedOptimizer): momentum, dampening, Nesterov's momentum (Sutskever
/// and others, ICML 2013), weight decay.
class FusedSGD : public FusedOptimizer {
 public:
  /// Options as torch::optim::SGD's; throws InvalidArgument for values out of their range.
  explicit FusedSGD(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                    const torch::optim::SGDOptions& defaults, const FusedOptions& options = {});
  explicit FusedSGD(std::vector<at::Tensor> params, const torch::optim::SGDOptions& defaults,
                    const FusedOptions& options = {});

  std::unique_ptr<torch::optim::OptimizerParamState> make_state() const override;

 protected:
  std::size_t tensor_count(const torch::optim::OptimizerOptions& options) const override;
  StateTensors tensors_of(const torch::optim::OptimizerParamState& state) const override;
  void set_tensors(torch::optim::OptimizerParamState& state, const StateTensors& tensors) const override;
  void update(const torch::optim::OptimizerOptions& options, std::vector<Update>& updates,
              double gradient_factor) override;
  bool same_options(const torch::optim::OptimizerOptions& a, const torch::optim::OptimizerOptions& b) const override;
  void write(torch::serialize::OutputArchive& archive) const override;
  void read(torch::serialize::InputArchive& archive) override;
};

}  // namespace ddpkit::optim
