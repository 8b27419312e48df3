// Tier 2: torch/nn/module.h. The three ways of --multi-gpu behind one interface.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/comm/timeline.h>
#include <ddpkit/parallel/pytree.h>

#include "har/model.h"
#include "har/options.h"

namespace har {

/// Part of a split.
struct Batch {
  at::Tensor windows;  ///< [batch, channels, steps] float32
  at::Tensor labels;   ///< [batch] int64

  std::int64_t size() const { return labels.size(0); }
};

inline Batch map_tensors(const Batch& batch, const ddpkit::TensorMap& map) {
  return {.windows = map(batch.windows), .labels = map(batch.labels)};
}

/// Where this process's model and batches lie: one device, or with kDp all it uses. Throws UsageError for GPUs that are
/// not there or given twice, for more ranks than GPUs, and for what does not fit the number of ranks.
std::vector<c10::Device> choose_devices(const TrainOptions& options, int local_rank, int local_world_size);

/// Computes gradients on the devices that --multi-gpu means.
class Devices {
 public:
  using Forward = std::function<at::Tensor(const at::Tensor& windows)>;
  /// The mean loss over a part of a batch, on one device; called in several threads at once with kDp.
  using Loss = std::function<at::Tensor(const Forward& forward, const Batch& part)>;

  virtual ~Devices() = default;

  /// Adds the gradient of the mean loss over the batches of all devices to the model's parameters, and returns that
  /// mean over this process's batch. Without `synchronise`, ranks keep their own gradients, to be added to the next.
  virtual at::Tensor backward(const Batch& batch, const Loss& loss, bool synchronise) = 0;
  virtual void set_timeline(const ddpkit::Timeline&) {}
  /// That one call of backward() works on.
  virtual int count() const = 0;
};

/// `devices`: choose_devices(). The model stays the caller's.
std::unique_ptr<Devices> make_devices(const TrainOptions& options, const std::vector<c10::Device>& devices,
                                      std::shared_ptr<Classifier> model, const ddpkit::ProcessGroup& group);

}  // namespace har
