// Tier 2: autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "parallel/autograd/graph.h"
#include "tensor/stream_set.h"

namespace ddpkit {

/// Hooks on the gradient accumulators of leaves. Not thread-safe: the owner locks. Several threads may run `call`.
class GradientHooks {
 public:
  /// Autograd has added `added` to the gradient of a leaf. `added` is undefined if a node returned no gradient.
  using Call = std::function<void(std::size_t leaf, const at::Tensor& added)>;
  /// A leaf has one exclusive hook: the newest. It replaces the older hook, which is never called again.
  enum class Kind { kShared, kExclusive };

  /// A graph may keep `call` longer than this object lives. `call` itself must not keep its owner alive.
  explicit GradientHooks(std::vector<at::Tensor> leaves, Call call, Kind kind = Kind::kShared);
  ~GradientHooks() { remove(); }
  GradientHooks(GradientHooks&&) noexcept = default;

  /// Installs the hooks again where autograd has a new accumulator, for example after torch::load(). An accumulator
  /// runs on the stream that was current at its creation. If the caller has changed streams, recreates all
  /// accumulators: then each gradient stays on the stream that produced it, and a CUDA graph can capture the step.
  void refresh();
  void remove() noexcept;

  /// Returns whether newer exclusive hooks have replaced any of these hooks.
  bool replaced() const noexcept { return shared_->replaced; }
  /// Returns the leaf of an accumulator. Empty for other nodes.
  std::optional<std::size_t> leaf_of(const torch::autograd::Node* node) const;
  /// Returns whether the backward on this thread may add to a leaf's gradient. torch::autograd::grad() does not.
  bool may_run() const;

  /// While `taker` lives, the owner removes each gradient from its leaf and passes shards to the taker.
  void set_sharded(std::weak_ptr<void> taker) noexcept { shared_->taker = std::move(taker); }
  static bool is_sharded(const at::Tensor& leaf);

 private:
  class Hook;
  struct Shared {
    Call call;
    Kind kind;
    std::atomic<bool> replaced{false};
    std::weak_ptr<void> taker = {};
  };
  struct Installed {
    at::Tensor leaf;
    NodePtr accumulator = {};  ///< Autograd keeps only a weak reference. Null for a frozen leaf.
    std::uintptr_t key = 0;
  };
  void install(std::size_t leaf);

  std::shared_ptr<Shared> shared_;
  std::vector<Installed> installed_;  ///< [leaf]
  std::unordered_map<const torch::autograd::Node*, std::size_t> leaf_of_;
  StreamSet streams_;                  ///< Always empty: only has the device.
  std::optional<c10::Stream> stream_;  ///< Current when the hooks were installed. Empty on the CPU.
};

}  // namespace ddpkit
