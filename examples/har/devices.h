// Tier 2: torch/nn/module.h. The modes of --multi-gpu behind one interface.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/pytree.h>

#include "har/model.h"
#include "har/options.h"

namespace ddpkit {
class DistributedDataParallelBase;
}

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

/// Returns the devices of this process's model and batches: one device, or all devices with kDp. Throws UsageError for
/// GPUs that do not exist or are given twice, for more ranks than GPUs, and for options that do not fit the number of
/// ranks.
std::vector<c10::Device> choose_devices(const TrainOptions& options, int local_rank, int local_world_size);

/// Computes gradients on the devices that --multi-gpu selects.
class Devices {
 public:
  using Forward = std::function<at::Tensor(const at::Tensor& windows)>;
  /// Computes the mean loss over a part of a batch on one device. kDp calls it from several threads at once.
  using Loss = std::function<at::Tensor(const Forward& forward, const Batch& part)>;

  virtual ~Devices() = default;

  /// Adds the gradient of the mean loss over the batches of all devices to the model's parameters. Returns the mean
  /// loss over this process's batch. Without `synchronise`, ranks keep their local gradients and add them to the next.
  virtual at::Tensor backward(const Batch& batch, const Loss& loss, bool synchronise) = 0;
  virtual ddpkit::DistributedDataParallelBase* wrapper() { return nullptr; }  ///< Null unless kDdp.
  /// Number of devices that one call of backward() uses.
  virtual int count() const = 0;
};

/// `devices`: from choose_devices(). The caller keeps ownership of the model.
std::unique_ptr<Devices> make_devices(const TrainOptions& options, const std::vector<c10::Device>& devices,
                                      std::shared_ptr<Classifier> model, const ddpkit::ProcessGroup& group);

}  // namespace har
