#include <ddpkit/parallel/sync_batch_norm.h>

#include "ddp_training.h"

namespace ddpkit::testing {
namespace {

namespace nn = torch::nn;

struct Cnn : PeerModel {
  Cnn() { register_module("layers", layers); }
  torch::Tensor forward(const torch::Tensor& x) override { return layers->forward(x); }
  nn::Sequential layers{nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)),
                        nn::BatchNorm2d(8),
                        nn::ReLU(),
                        nn::MaxPool2d(2),
                        nn::Conv2d(nn::Conv2dOptions(8, 16, 3).padding(1).bias(false)),
                        nn::BatchNorm2d(16),
                        nn::ReLU(),
                        nn::AdaptiveAvgPool2d(2),
                        nn::Flatten(),
                        nn::Linear(64, 5)};
};

[[maybe_unused]] const bool sync_batch_norm_added = [] {
  peer_cases()["sync_batch_norm"] = {.make = [](const ProcessGroup& group) -> std::shared_ptr<PeerModel> {
    auto model = std::make_shared<Cnn>();
    convert_sync_batchnorm(*model, group);
    return model;
  }};
  return true;
}();

}  // namespace
}  // namespace ddpkit::testing
