// Tier 0: the standard library only.
#pragma once

namespace ddpkit::optim {

/// An optimizer that can multiply gradients on its way through them.
class GradientScaling {
 public:
  virtual ~GradientScaling() = default;
  /// The next step() reads all gradients as if they had been multiplied by `factor`. Factors of several calls multiply,
  /// and hold until that step, or until reset_scale().
  virtual void scale_gradients(double factor) = 0;
  /// Takes these factors back, since the gradients that they were for are not used: a skipped step, zero_grad().
  virtual void reset_scale() noexcept = 0;
  /// Whether each rank sees other gradients than the others.
  virtual bool has_sharded_gradients() const noexcept { return false; }
};

}  // namespace ddpkit::optim
