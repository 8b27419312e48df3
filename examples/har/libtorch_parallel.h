// Tier 0, and c10/core/Device.h.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <vector>

namespace har {

class Classifier;
class Devices;

/// Uses torch::nn::parallel::data_parallel, which clones the model to the devices in every step and gathers all outputs
/// on the first. Throws UsageError in a build without CUDA.
std::unique_ptr<Devices> make_libtorch_parallel(std::shared_ptr<Classifier> model,
                                                const std::vector<c10::Device>& devices);

}  // namespace har
