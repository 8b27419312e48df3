// The output of DDPKIT_DEBUG, and which rank prints it.
#include <torch/torch.h>

#include <limits>

#include <ddpkit/parallel/distributed_data_parallel.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::DistributedDataParallel;
using ddpkit::ProcessGroup;
using ddpkit::testing::stderr_of;

namespace {

/// Its first parameter's gradient arrives last in backward, against the order of registration.
struct CrossedImpl : torch::nn::Module {
  CrossedImpl() {
    late = register_module("late", torch::nn::Linear(8, 8));
    early = register_module("early", torch::nn::Linear(8, 8));
  }
  torch::Tensor forward(const torch::Tensor& x) { return late(early(x)); }
  torch::nn::Linear late{nullptr}, early{nullptr};
};
TORCH_MODULE(Crossed);

/// Returns the output of three steps. In step 1, rank `broken`'s gradient is not finite.
std::string printed_by_training(const ProcessGroup& group, int broken) {
  return stderr_of([&] {
    Crossed model;
    DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0.0001, .first_bucket_cap_mb = 0.0001});
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      const bool breaks = step == 1 && group.rank() == broken;
      ddp(torch::full({1, 8}, breaks ? std::numeric_limits<float>::infinity() : 1.0f)).sum().backward();
    }
  });
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

}  // namespace

TEST_CASE("DDPKIT_DEBUG=info prints options and buckets once, and their rebuilding", "[ranks][ddp][debug]") {
  ddpkit::testing::on_ranks("DDPKIT_DEBUG=info prints options and buckets once, and their rebuilding", {2, 3},
                            [](ProcessGroup& group) {
                              const std::string text = printed_by_training(group, -1);
                              INFO(text);
                              if (group.rank() != 0) {
                                CHECK(text.empty());
                                return;
                              }
                              CHECK(count(text, "[ddpkit rank 0] DistributedDataParallel on") == 1);
                              CHECK(count(text, "bucket_cap_mb 0.0001") == 2);  // The first one's too.
                              CHECK(count(text, "find_unused_parameters false") == 1);
                              CHECK(count(text, "4 dense parameters") == 2);
                              CHECK(count(text, "rebuilt") == 1);
                              CHECK(count(text, "early.weight") == 2);
                              CHECK(text.find("bucket 0: ") < text.find("rebuilt"));
                            },
                            {.environment = {{"DDPKIT_DEBUG", "info"}}});
}

TEST_CASE("DDPKIT_DEBUG=detail names the parameter and the rank of a gradient that is not finite",
          "[ranks][ddp][debug]") {
  ddpkit::testing::on_ranks("DDPKIT_DEBUG=detail names the parameter and the rank of a gradient that is not finite",
                            {2, 3},
                            [](ProcessGroup& group) {
                              const std::string text = printed_by_training(group, 1);
                              INFO(text);
                              const bool broken = group.rank() == 1;
                              CHECK(count(text, "not finite") == (broken ? 2 : 0));  // Both weights, no bias.
                              CHECK(count(text,
                                          "[ddpkit rank 1] the gradient of early.weight is not finite in "
                                          "backward number 1") == (broken ? 1 : 0));
                            },
                            {.environment = {{"DDPKIT_DEBUG", "detail"}}});
}

TEST_CASE("without DDPKIT_DEBUG nothing is printed", "[ranks][ddp][debug]") {
  ddpkit::testing::on_ranks("without DDPKIT_DEBUG nothing is printed", 2,
                            [](ProcessGroup& group) { CHECK(printed_by_training(group, 1).empty()); },
                            {.environment = {{"DDPKIT_DEBUG", ""}}});
}
