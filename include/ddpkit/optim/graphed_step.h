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
  /// So many calls run as they are before one is captured: for what is made only once, such as NCCL's communicators,
  /// the optimizer's state, the order of DistributedDataParallel's buckets. At least 3.
  int warmup_iterations = 11;
};

/// A training step as one CUDA graph: forward, backward with its all-reduces, and update are queued by one call of the
/// driver's, which is what pays for models of many small kernels.
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
/// Every call is a step of the training: the first ones run eagerly, on a stream of the step's own, then one is
/// captured, and from then on each call copies its inputs to where the captured one had them and replays it. Inputs
/// keep their shapes and types. What the function does on the host happens once and no more; it must not wait for the
/// device (item(), clip_grad_norm, a GradScaler, find_unused_parameters). Between calls a LearningRateScheduler may
/// step and the optimizers may load a state. With several ranks all capture at the same call, by `nccl`.
class GraphedStep {
 public:
  using Tensors = std::vector<at::Tensor>;
  /// One step of the training: `inputs` as passed to operator(); returns what operator() is to return.
  using Step = std::function<Tensors(const Tensors& inputs)>;

  /// `optimizers`: all that `step` calls, made with FusedOptions::capturable; they outlive this. Throws InvalidArgument
  /// for a device that is not CUDA's, in a build without CUDA, and for an optimizer that is not capturable.
  GraphedStep(c10::Device device, std::vector<FusedOptimizer*> optimizers, Step step,
              const GraphedStepOptions& options = {});
  ~GraphedStep();
  GraphedStep(const GraphedStep&) = delete;
  GraphedStep& operator=(const GraphedStep&) = delete;

  /// What the function returned, for the caller's current stream; once captured, in memory that the next call
  /// overwrites. Throws InvalidArgument for inputs of other shapes than the captured ones, and if an optimizer's
  /// parameters or options other than the learning rate changed after the capture; Error where the step cannot be
  /// captured.
  Tensors operator()(const Tensors& inputs);

  /// Whether calls replay the graph by now.
  bool captured() const noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ddpkit::optim
