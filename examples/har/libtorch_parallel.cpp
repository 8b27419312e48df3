#include <torch/nn/parallel/data_parallel.h>

#include <utility>

#include "har/devices.h"
#include "har/libtorch_parallel.h"

namespace har {
namespace {

class LibTorchParallel : public Devices {
 public:
  LibTorchParallel(std::shared_ptr<Classifier> model, std::vector<c10::Device> devices)
      : model_(std::move(model)), devices_(std::move(devices)) {}

  at::Tensor backward(const Split& batch, const Loss& loss, bool) override {
    const at::Tensor value = loss(
        [this](const at::Tensor& windows) { return torch::nn::parallel::data_parallel(model_, windows, devices_); },
        batch);
    value.backward();
    return value.detach();
  }

 private:
  std::shared_ptr<Classifier> model_;
  std::vector<c10::Device> devices_;
};

}  // namespace

std::unique_ptr<Devices> make_libtorch_parallel(std::shared_ptr<Classifier> model,
                                                const std::vector<c10::Device>& devices) {
  return std::make_unique<LibTorchParallel>(std::move(model), devices);
}

}  // namespace har
