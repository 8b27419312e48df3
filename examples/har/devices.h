// Tier 2: torch/nn/module.h. The modes of --multi-gpu behind one interface.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <vector>

#include <ddpkit/comm/process_group.h>

#include "har/dataset.h"
#include "har/model.h"
#include "har/options.h"

namespace ddpkit {
class DistributedDataParallelBase;
}

namespace har {

/// Returns the devices of this process's model and batches: one device, or all devices with kDp. Throws UsageError for
/// GPUs that do not exist or are given twice, for more ranks than GPUs, and for options that do not fit the number of
/// ranks. `declared`: see declare().
std::vector<c10::Device> choose_devices(const TrainOptions& options, const ddpkit::train::Options& declared);

/// Computes gradients on the devices that --multi-gpu selects.
class Devices {
 public:
  using Forward = std::function<at::Tensor(const at::Tensor& windows)>;
  /// Computes the mean loss over a part of a batch on one device. kDp calls it from several threads at once.
  using Loss = std::function<at::Tensor(const Forward& forward, const Split& part)>;

  virtual ~Devices() = default;

  /// Adds the gradient of the mean loss over the batches of all devices to the model's parameters. Returns the mean
  /// loss over this process's batch. Without `synchronise`, ranks keep their local gradients and add them to the next.
  virtual at::Tensor backward(const Split& batch, const Loss& loss, bool synchronise) = 0;
  virtual ddpkit::DistributedDataParallelBase* wrapper() { return nullptr; }  ///< Null unless kDdp.
};

/// `devices`: from choose_devices(). The caller keeps ownership of the model.
std::unique_ptr<Devices> make_devices(const TrainOptions& options, const std::vector<c10::Device>& devices,
                                      std::shared_ptr<Classifier> model, const ddpkit::ProcessGroup& group);

}  // namespace har
