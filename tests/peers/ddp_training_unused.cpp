#include "ddp_training.h"

namespace ddpkit::testing {
namespace {

namespace nn = torch::nn;

/// Uses one head per step: both ranks head 0 in even steps, rank r head r in odd steps. One layer is never used.
struct Heads : PeerModel {
  Heads() {
    register_module("trunk", trunk);
    register_module("heads", heads);
    register_module("never", never);
  }
  void begin_step(int step, int rank) override { head = step % 2 == 0 ? 0 : rank; }
  torch::Tensor forward(const torch::Tensor& x) override {
    return heads->at<nn::LinearImpl>(static_cast<std::size_t>(head)).forward(torch::relu(trunk->forward(x)));
  }
  nn::Linear trunk{20, 32};
  nn::ModuleList heads{nn::Linear(32, 5), nn::Linear(32, 5)};
  nn::Linear never{7, 7};
  int head = 0;
};

[[maybe_unused]] const bool unused_added = [] {
  peer_cases()["unused"] = {make_peer_model<Heads>, {.bucket_cap_mb = 0.002, .find_unused_parameters = true}};
  return true;
}();

}  // namespace
}  // namespace ddpkit::testing
