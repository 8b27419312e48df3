#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <atomic>
#include <thread>

#include <ddpkit/error.h>
#include <ddpkit/optim/precision.h>
#include <ddpkit/parallel/data_parallel.h>

#include "support/catch.h"

using ddpkit::optim::Autocast;
using ddpkit::optim::Precision;

namespace {

/// Returns the type of matrix products on this thread.
torch::ScalarType product_type() { return torch::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type(); }

/// A weight of equal elements. Its product shows which value the cast copied.
struct Weight {
  float product() const { return torch::mm(torch::ones({2, 2}), tensor)[0][0].item<float>(); }
  void fill(float value) const {
    const torch::NoGradGuard no_grad;
    tensor.fill_(value);
  }
  torch::Tensor tensor = torch::ones({2, 2}).requires_grad_(true);
};

}  // namespace

TEST_CASE("autocast holds for its scope, nests, and is the thread's own", "[optim][precision]") {
  CHECK(product_type() == torch::kFloat);
  {
    const Autocast outer(torch::kCPU, torch::kBFloat16);
    CHECK(product_type() == torch::kBFloat16);
    // exp() needs the range.
    CHECK(torch::ones({2}, torch::kBFloat16).exp().scalar_type() == torch::kBFloat16);
    CHECK(torch::mse_loss(torch::ones({2}, torch::kBFloat16), torch::ones({2}, torch::kBFloat16)).scalar_type() ==
          torch::kFloat);
    {
      const Autocast inner(torch::kCPU, torch::kHalf);
      CHECK(product_type() == torch::kHalf);
      const Autocast off(torch::kCPU, torch::kHalf, {.enabled = false});
      CHECK(product_type() == torch::kFloat);
    }
    CHECK(product_type() == torch::kBFloat16);
    torch::ScalarType there = torch::kBFloat16;
    std::thread([&] { there = product_type(); }).join();
    CHECK(there == torch::kFloat);
    CHECK_THROWS_AS(Autocast(torch::kCPU, torch::kDouble), ddpkit::InvalidArgument);
    CHECK(product_type() == torch::kBFloat16);
  }
  CHECK(product_type() == torch::kFloat);
}

TEST_CASE("the casts of weights end with the outermost scope", "[optim][precision]") {
  const Weight weight;
  {
    const Autocast outer(torch::kCPU, torch::kBFloat16);
    {
      const Autocast inner(torch::kCPU, torch::kBFloat16);
      CHECK(weight.product() == 2);
    }
    weight.fill(3);
    CHECK(weight.product() == 2);  // Still the earlier cast.
    const Autocast uncached(torch::kCPU, torch::kBFloat16, {.cache = false});
  }
  const Autocast next(torch::kCPU, torch::kBFloat16);
  CHECK(weight.product() == 6);
}

TEST_CASE("scopes on DataParallel's threads leave the casts of others alone", "[optim][precision][dp]") {
  const Weight weight;
  ddpkit::DataParallel<torch::nn::LinearImpl> dp(std::make_shared<torch::nn::LinearImpl>(2, 2),
                                                 {.devices = {torch::kCPU, torch::kCPU}});
  const Autocast outer(torch::kCPU, torch::kBFloat16);
  CHECK(weight.product() == 2);
  weight.fill(3);
  std::atomic<int> scopes = 0, uncached = 0;
  dp.train_step(torch::ones({4, 2}), [&](torch::nn::LinearImpl& replica, const torch::Tensor& part) {
    const Autocast autocast(torch::kCPU, torch::kBFloat16);
    ++scopes;
    uncached += at::autocast::is_autocast_cache_enabled() ? 0 : 1;
    const torch::Tensor output = replica.forward(part);
    return output.scalar_type() == torch::kBFloat16 ? output.to(torch::kFloat).sum() : torch::Tensor();
  });
  CHECK(scopes == 2);
  CHECK(uncached == 2);
  CHECK(weight.product() == 2);  // Still the earlier cast.
}

TEST_CASE("autocast names what it does not take", "[optim][precision]") {
  CHECK_THROWS_WITH(Autocast(torch::kMeta, torch::kBFloat16), ContainsSubstring("not meta"));
  CHECK_THROWS_WITH(Autocast(torch::kCPU, torch::kFloat), ContainsSubstring("not in Float"));
}

TEST_CASE("TensorFloat-32 and cuDNN's benchmark are refused without a GPU", "[optim][precision]") {
  const Precision before = ddpkit::optim::precision();
  CHECK_THROWS_WITH(ddpkit::optim::set_precision({.matmul_tf32 = true}, torch::kCPU),
                    ContainsSubstring("cpu has no TensorFloat-32"));
  // On an error, no setting changes.
  CHECK_THROWS_WITH(ddpkit::optim::set_precision({.cudnn_tf32 = false, .cudnn_benchmark = true}, torch::kCPU),
                    ContainsSubstring("needs a GPU"));
  CHECK(ddpkit::optim::precision().cudnn_tf32 == before.cudnn_tf32);
  CHECK(ddpkit::optim::precision().cudnn_benchmark == false);
  REQUIRE(before.cudnn_tf32 == true);
  ddpkit::optim::set_precision({.cudnn_tf32 = false}, torch::kCPU);
  CHECK(ddpkit::optim::precision().cudnn_tf32 == false);
  CHECK(ddpkit::optim::precision().matmul_tf32 == before.matmul_tf32);
  at::globalContext().setAllowTF32CuDNN(true);
}
