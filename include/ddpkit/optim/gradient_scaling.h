// Tier 0: the standard library only.
#pragma once

namespace ddpkit::optim {

/// An optimizer that can multiply gradients on its way through them.
class GradientScaling {
 public:
  virtual ~GradientScaling() = default;
  /// The next step() reads all gradients as if they had been multiplied by `factor`. Factors of several calls multiply,
  /// and hold for one step.
  virtual void scale_gradients(double factor) = 0;
  /// Whether each rank sees other gradients than the others.
  virtual bool has_sharded_gradients() const noexcept { return false; }
};

}  // namespace ddpkit::optim
