// Tier 1: ATen/core/Tensor.h. Torch's optimizers and archives are only declared.
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

/// Names and defaults are those of Python's torch.amp.GradScaler.
struct GradScalerOptions {
  double init_scale = 65536;            ///< Scale of the first iterations.
  double growth_factor = 2;             ///< Above 1.
  double backoff_factor = 0.5;          ///< Between 0 and 1.
  std::int64_t growth_interval = 2000;  ///< Iterations.
  /// False: all functions behave as if there were no scaler.
  bool enabled = true;
};

/// Prevents underflow of small float16 gradients. Multiplies the loss by a scale and the gradients by its inverse,
/// skips steps whose gradients overflowed, and searches the largest scale that works. Same as Python's
/// torch.amp.GradScaler, after Micikevicius and others, arXiv 1710.03740. bfloat16 does not need a scaler.
///
/// If a gradient overflows on one rank of `group`, all ranks skip the step. So the weights stay the same on all ranks,
/// even if gradients are not averaged. The scale is the same on every rank.
///
///     scaler.scale(loss).backward();
///     scaler.unscale_(optimizer);                 // only where gradients are looked at or clipped before the step
///     clip_grad_norm_(model->parameters(), 1.0);
///     scaler.step(optimizer);
///     scaler.update();
class GradScaler {
 public:
  /// `group`: the ranks that skip steps together. Empty: only this rank. Throws InvalidArgument for factors out of
  /// range.
  explicit GradScaler(std::optional<ProcessGroup> group = std::nullopt, const GradScalerOptions& options = {});

  /// Returns `loss` (any shape) times the scale.
  at::Tensor scale(const at::Tensor& loss) const;

  /// Divides the gradients of the optimizer's parameters by the scale, in place, and checks for infinities and NaN.
  /// Collective. Call it at most once per optimizer between updates. Throws InvalidArgument for a second call and for
  /// float16 gradients, which could underflow: step() of a fused optimizer takes scaled gradients (see
  /// FusedOptions::master_weights).
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Calls optimizer.step(), unless a gradient was infinite or NaN on any rank. Returns whether it was called. Unscales
  /// the gradients first if unscale_() was not called; this is then collective. A fused optimizer of ddpkit divides by
  /// the scale within its update, and the gradients in memory do not change.
  bool step(torch::optim::Optimizer& optimizer);

  /// Call after the last step() of an iteration. Multiplies the scale by `backoff_factor` if a step was skipped, and by
  /// `growth_factor` after `growth_interval` iterations in a row without a skipped step. Or sets it to `new_scale`.
  void update(std::optional<double> new_scale = std::nullopt);

  /// Returns the factor of scale().
  double get_scale() const noexcept { return options_.enabled ? scale_ : 1; }
  std::int64_t get_growth_tracker() const noexcept { return growth_tracker_; }  ///< Iterations since the last change.
  /// Returns GradScalerOptions::enabled.
  bool is_enabled() const noexcept { return options_.enabled; }

  /// Saves scale, growth tracker and options. Makes GradScaler a CheckpointPart.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Restores scale, growth tracker and options.
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
