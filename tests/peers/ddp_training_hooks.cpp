#include <ddpkit/parallel/comm_hooks.h>
#include <ddpkit/parallel/power_sgd.h>

#include "ddp_training.h"

namespace ddpkit::testing {
namespace {

namespace nn = torch::nn;

struct Mlp : PeerModel {
  Mlp() { register_module("layers", layers); }
  torch::Tensor forward(const torch::Tensor& x) override { return layers->forward(x); }
  nn::Sequential layers{nn::Linear(20, 64), nn::ReLU(), nn::Linear(64, 64), nn::ReLU(),
                        nn::Linear(64, 64), nn::ReLU(), nn::Linear(64, 5)};
};

PeerCase with(std::function<CommHook(const ProcessGroup&)> hook) {
  return {.make = make_peer_model<Mlp>, .hook = std::move(hook)};
}

CommHook power_sgd(const ProcessGroup& group, std::int64_t rank, bool batch) {
  return comm_hooks::PowerSGD(group, {.matrix_approximation_rank = rank,
                                      .start_powerSGD_iter = 5,
                                      .min_compression_rate = 1,
                                      .batch_tensors_with_same_shape = batch});
}

[[maybe_unused]] const bool added = [] {
  peer_cases()["fp16"] = with(comm_hooks::fp16_compress);
  peer_cases()["bf16"] = with(comm_hooks::bf16_compress);
  peer_cases()["power_sgd"] = with([](const ProcessGroup& group) { return power_sgd(group, 1, false); });
  // In double: what a step compresses away comes back later, and with it, multiplied, how the two round float.
  peer_cases()["power_sgd_4"] = with([](const ProcessGroup& group) { return power_sgd(group, 4, true); });
  peer_cases()["power_sgd_4"].make = [](const ProcessGroup&) -> std::shared_ptr<PeerModel> {
    auto model = std::make_shared<Mlp>();
    model->to(torch::kDouble);
    return model;
  };
  return true;
}();

}  // namespace
}  // namespace ddpkit::testing
