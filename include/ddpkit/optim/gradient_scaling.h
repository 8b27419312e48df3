// Tier 0: the standard library only.
#pragma once

namespace ddpkit::optim {

/// An optimizer that can multiply gradients while it reads them.
class GradientScaling {
 public:
  virtual ~GradientScaling() = default;
  /// step(), with all gradients multiplied by `factor` as they are read. The gradients themselves keep their values.
  virtual void step_scaled(double factor) = 0;
  /// Whether each rank sees other gradients than the others.
  virtual bool has_sharded_gradients() const noexcept { return false; }
};

}  // namespace ddpkit::optim
