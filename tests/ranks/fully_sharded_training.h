// Training of a fully sharded model, compared with the same training in one process.
#pragma once

#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/sharded_optimizer.h>

#include <optional>

#include "ranks/comparisons.h"
#include "ranks/fully_sharded_models.h"

namespace ddpkit::testing {

inline constexpr int kSteps = 20;

/// A larger eps than the default: some gradients are zero but for rounding, which Adam would amplify.
inline const auto kAdamW = torch::optim::AdamWOptions(1e-2).weight_decay(0.1).eps(1e-3);

struct Training {
  FullyShardedOptions options = {.min_unit_mb = 0};
  at::ScalarType dtype = at::kDouble;
  double max_norm = 0;
  int accumulate = 1;    ///< Backwards per step.
  bool no_sync = false;  ///< In all but the last backward of a step.
  int steps = kSteps;
  std::function<void(LossModel& model, int step)> before_step = {};
  std::optional<at::Device> alone = std::nullopt;  ///< Of the training in one process; by default the group's device.
};

/// Compares with the same training in one process: losses, clipped norms, and the weights and buffers at the end.
inline void check_trains_as_alone(ProcessGroup& group, const MakeModel& make_model, const Training& training = {}) {
  const double tolerance = training.dtype == at::kDouble ? 1e-10 : 1e-5;
  const auto alone = make_model();
  const at::Device device = training.alone.value_or(group.device());
  alone->to(device);
  optim::FusedAdamW alone_optimizer(alone->parameters(), kAdamW);
  const auto model = make_model();
  model->to(group.device());
  FullyShardedDataParallel fsdp(model, group, training.options);
  optim::ShardedOptimizer<optim::FusedAdamW> optimizer(fsdp, kAdamW);
  for (int step = 0; step < training.steps; ++step) {
    alone_optimizer.zero_grad();
    optimizer.zero_grad();
    for (LossModel* one : {alone.get(), model.get()}) {
      if (training.before_step) training.before_step(*one, step);
    }
    for (int part = 0; part < training.accumulate; ++part) {
      const int batch = step * training.accumulate + part;
      const double expected = backward_alone(*alone, batch, group.world_size(), group.rank(), training.dtype);
      std::optional<Reducer::NoSync> local;
      if (training.no_sync && part + 1 < training.accumulate) local.emplace(fsdp.no_sync());
      const at::Tensor loss = fsdp(model->input(batch, group.rank(), training.dtype).to(group.device()));
      loss.backward();
      CHECK(std::abs(loss.item<double>() - expected) < tolerance);
    }
    if (training.max_norm > 0) {
      const double expected = torch::nn::utils::clip_grad_norm_(alone->parameters(), training.max_norm);
      CHECK(std::abs(optimizer.clip_grad_norm(training.max_norm) - expected) < tolerance);
    }
    alone_optimizer.step();
    optimizer.step();
  }
  for (const auto& parameter : model->parameters()) CHECK_FALSE(parameter.grad().defined());
  const auto whole = fsdp.whole();
  const auto names = model->named_parameters().keys();
  for (std::size_t i = 0; i < names.size(); ++i) {
    INFO("parameter " << names[i]);
    CHECK(largest_difference(model->parameters()[i].detach().to(device), alone->parameters()[i].detach()) < tolerance);
    check_same_bits_on_all_ranks(group, model->parameters()[i].detach());
  }
  if (group.rank() != 0) return;
  for (std::size_t i = 0; i < model->buffers().size(); ++i)
    CHECK(largest_difference(model->buffers()[i].to(device), alone->buffers()[i]) < tolerance);
}

}  // namespace ddpkit::testing
