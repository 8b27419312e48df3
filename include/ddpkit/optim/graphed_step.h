// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace ddpkit::optim {

class FusedOptimizer;

/// Options of GraphedStep.
struct GraphedStepOptions {
  /// Number of eager calls before the capture. In these calls everything is created that is created only once: NCCL's
  /// communicators, the optimizer's state, the order of DistributedDataParallel's buckets. At least 3.
  int warmup_iterations = 11;
};

/// A training step as one CUDA graph. One driver call queues forward, backward with its all-reduces, and update. This
/// is faster for models with many small kernels.
///
///     ddpkit::optim::FusedAdamW optimizer(model->parameters(), 1e-3, {.capturable = true});
///     ddpkit::optim::GraphedStep step(group.device(), {&optimizer}, [&](const std::vector<at::Tensor>& batch) {
///       optimizer.zero_grad();
///       auto loss = torch::cross_entropy_loss(ddp(batch[0]), batch[1]);
///       loss.backward();
///       optimizer.step();
///       return std::vector{loss.detach()};
///     });
///     for (auto& batch : *loader) step({batch.data.to(device), batch.target.to(device)});
///
/// Every call is a training step. The first calls run eagerly, on a separate stream. Then one call is captured. Each
/// later call copies its inputs to the inputs of the captured call, and replays the graph. Inputs must keep their
/// shapes and types. Host code in the function runs only until the capture. The function must not wait for the device
/// (item(), clip_grad_norm, a GradScaler, find_unused_parameters). Between calls, a LearningRateScheduler may step and
/// the optimizers may load a state. With several ranks, use `nccl`; all ranks capture at the same call.
class GraphedStep {
 public:
  using Tensors = std::vector<at::Tensor>;  ///< Inputs or results of a step.
  /// One training step. `inputs` are the arguments of operator(); the result is the result of operator().
  using Step = std::function<Tensors(const Tensors& inputs)>;

  /// `optimizers`: all optimizers that `step` calls, made with FusedOptions::capturable. They must outlive this object.
  /// Throws InvalidArgument if the device is not a CUDA device, if the build has no CUDA, or if an optimizer is not
  /// capturable.
  GraphedStep(c10::Device device, std::vector<FusedOptimizer*> optimizers, Step step,
              const GraphedStepOptions& options = {});
  ~GraphedStep();
  GraphedStep(const GraphedStep&) = delete;
  GraphedStep& operator=(const GraphedStep&) = delete;

  /// Runs one step and returns the results of the function, for the caller's current stream. After the capture, the
  /// next call overwrites them. Throws InvalidArgument if inputs have other shapes than the captured ones, or if an
  /// optimizer's parameters or options other than the learning rate changed after the capture. Throws Error if the step
  /// cannot be captured.
  Tensors operator()(const Tensors& inputs);

  /// Returns whether the step has been captured, so that calls replay the graph.
  bool captured() const noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ddpkit::optim
