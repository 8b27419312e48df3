// Tier 2: autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "parallel/autograd/gradient_hooks.h"

namespace ddpkit {

/// Detects the end of a backward. A backward is one graph task of autograd. If a node of another backward runs it, as
/// reentrant checkpoints do, the outer graph task continues it. Not thread-safe: the owner locks.
class BackwardTracker {
 public:
  using Action = std::function<void()>;

  /// `owner` holds this object, `mutex` and `hooks`. Autograd calls actions under `mutex`, while the owner lives. A
  /// backward keeps the owner alive until on_end has run.
  BackwardTracker(std::weak_ptr<void> owner, std::recursive_mutex& mutex, const GradientHooks& hooks, Action on_end);

  /// `action` runs whenever a backward reaches one of the outputs. A leaf may outlive the forward pass, and keeps its
  /// hooks.
  void at_outputs(const std::vector<at::Tensor>& outputs, bool leaves_too, Action action) const;
  /// Call at an output. The backward ends with this graph task, even if the task runs within another backward.
  /// Examples: a checkpoint contains the whole model, or a hook of another model calls backward().
  void note_output_reached();

  /// Call in each hook on a gradient: on_end will run at the end of this graph task.
  void enter();
  /// Call in on_end. Returns whether an outer backward continues the backward that has ended. If so, on_end runs again.
  bool continues_outside();
  /// Returns whether on_end will still run. Returns false after an exception elsewhere in the graph.
  bool will_end() const { return waits_for_outer_ || !alive_.expired(); }
  /// Returns whether this thread runs a backward.
  static bool inside_backward();
  /// The backward has ended or failed.
  void reset() noexcept;

 private:
  struct NodeHook;
  Action guarded(Action action) const;
  void queue_end();

  std::weak_ptr<void> owner_;
  std::recursive_mutex& mutex_;
  const GradientHooks& hooks_;
  Action on_end_;
  int end_task_ = -1;             ///< The graph task at whose end on_end was last queued.
  int output_task_ = -1;          ///< The graph task that reached an output last.
  std::weak_ptr<void> alive_;     ///< Held by graph tasks that will call on_end: expires if they throw.
  bool waits_for_outer_ = false;  ///< A nested backward has ended, and the outer backward has not continued.
  /// Added by continues_outside(). Does not own nodes: the destructor of a node locks its mutex, under which a backward
  /// locks ours.
  std::vector<std::pair<WeakNodePtr, const void*>> outer_hooks_;
};

}  // namespace ddpkit
