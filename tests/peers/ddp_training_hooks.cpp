#include <ddpkit/parallel/comm_hooks.h>
#include <ddpkit/parallel/power_sgd.h>

#include "ddp_training.h"

namespace ddpkit::testing {
namespace {

namespace nn = torch::nn;

struct DeepMlp : PeerModel {
  DeepMlp() { register_module("layers", layers); }
  torch::Tensor forward(const torch::Tensor& x) override { return layers->forward(x); }
  nn::Sequential layers{nn::Linear(20, 64), nn::ReLU(), nn::Linear(64, 64), nn::ReLU(),
                        nn::Linear(64, 64), nn::ReLU(), nn::Linear(64, 5)};
};

PeerCase with(std::function<CommHook(const ProcessGroup&)> hook) {
  return {.make = make_peer_model<DeepMlp>, .hook = std::move(hook)};
}

/// In double: PowerSGD carries compression errors to later steps and amplifies the rounding differences of float.
PeerCase with_power_sgd(std::int64_t rank, std::uint64_t start, bool batch) {
  PeerCase peer_case = with([rank, start, batch](const ProcessGroup& group) -> CommHook {
    return comm_hooks::PowerSGD(group, {.matrix_approximation_rank = rank,
                                        .start_powerSGD_iter = start,
                                        .min_compression_rate = 1,
                                        .batch_tensors_with_same_shape = batch});
  });
  peer_case.make = [](const ProcessGroup&) -> std::shared_ptr<PeerModel> {
    auto model = std::make_shared<DeepMlp>();
    model->to(torch::kDouble);
    return model;
  };
  return peer_case;
}

[[maybe_unused]] const bool hooks_added = [] {
  peer_cases()["fp16"] = with(comm_hooks::fp16_compress);
  peer_cases()["bf16"] = with(comm_hooks::bf16_compress);
  peer_cases()["power_sgd"] = with_power_sgd(1, 5, false);
  // Differences grow by a factor of about 1.7 per compressed step. On some processors they would hide the result.
  peer_cases()["power_sgd_4"] = with_power_sgd(4, 35, true);
  return true;
}();

}  // namespace
}  // namespace ddpkit::testing
