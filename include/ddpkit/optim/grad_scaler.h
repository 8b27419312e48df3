// Tier 1: ATen/core/Tensor.h. Torch's optimizers and archives are declared, not included.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>

#include <ddpkit/comm/process_group.h>

namespace torch::optim {
class Optimizer;
}
namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace ddpkit::optim {

/// Names and defaults of Python's torch.amp.GradScaler.
struct GradScalerOptions {
  double init_scale = 65536;            ///< Of the first iterations.
  double growth_factor = 2;             ///< Above 1.
  double backoff_factor = 0.5;          ///< Between 0 and 1.
  std::int64_t growth_interval = 2000;  ///< Iterations.
  /// False: every call passes through as if there were no scaler.
  bool enabled = true;
};

/// Keeps small float16 gradients from vanishing: multiplies the loss by a scale and the gradients by its inverse, skips
/// the steps whose gradients overflowed, and finds the largest scale that works. Python's torch.amp.GradScaler, after
/// Micikevicius and others, arXiv 1710.03740. On bfloat16 there is nothing to gain from it.
///
/// An overflow on any rank of `group` skips the step on all of them, so that their weights stay the same even where
/// gradients are not averaged; the scale is the same on every rank.
///
///     scaler.scale(loss).backward();
///     scaler.unscale_(optimizer);                 // only where gradients are looked at or clipped before the step
///     clip_grad_norm_(model->parameters(), 1.0);
///     scaler.step(optimizer);
///     scaler.update();
class GradScaler {
 public:
  /// `group`: the ranks that agree; empty: this one alone. Throws InvalidArgument for factors that make no sense.
  explicit GradScaler(std::optional<ProcessGroup> group = std::nullopt, const GradScalerOptions& options = {});

  /// `loss` (of any shape) times the scale.
  at::Tensor scale(const at::Tensor& loss) const;

  /// Divides the gradients of the optimizer's parameters by the scale, in place, and looks for infinities and NaN.
  /// Collective. Once for each optimizer between updates; throws InvalidArgument otherwise, and for float16 gradients,
  /// which could vanish: step() of a fused optimizer takes them scaled (see FusedOptions::master_weights).
  void unscale_(torch::optim::Optimizer& optimizer);

  /// optimizer.step(), unless a gradient was infinite or NaN on any rank; returns whether it was called. Does what
  /// unscale_() does where that has not been called; with a fused optimizer of ddpkit's the division is then part of
  /// the update's own pass, and the gradients stay as they are. Collective where unscale_() was not called.
  bool step(torch::optim::Optimizer& optimizer);

  /// After the last step() of an iteration: shrinks the scale by `backoff_factor` when a step was skipped, grows it by
  /// `growth_factor` after `growth_interval` iterations in a row without, or sets it to `new_scale`.
  void update(std::optional<double> new_scale = std::nullopt);

  /// What scale() multiplies by.
  double get_scale() const noexcept { return options_.enabled ? scale_ : 1; }
  std::int64_t get_growth_tracker() const noexcept { return growth_tracker_; }  ///< Iterations since the last change.
  /// GradScalerOptions::enabled.
  bool is_enabled() const noexcept { return options_.enabled; }

  /// The scale, the growth tracker and the options: a CheckpointPart.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  enum class Stage { kReady, kUnscaled, kStepped };
  struct PerOptimizer {
    Stage stage = Stage::kReady;
    bool found_inf = false;
  };

  void check_group(const torch::optim::Optimizer& optimizer) const;
  bool on_any_rank(bool found_inf, const at::Device& device) const;

  std::optional<ProcessGroup> group_;
  GradScalerOptions options_;
  double scale_;
  std::int64_t growth_tracker_ = 0;
  std::map<const torch::optim::Optimizer*, PerOptimizer> optimizers_;
};

}  // namespace ddpkit::optim
