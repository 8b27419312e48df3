// FullyShardedDataParallel whose weights and gradients have fewer bits than the shards, compared with one process that
// rounds at the same places.
#include <torch/torch.h>

#include <cstring>

#include <ddpkit/error.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/parallel/fully_sharded_data_parallel.h>

#include "ranks/comparisons.h"
#include "ranks/fully_sharded_models.h"
#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::FullyShardedDataParallel, ddpkit::FullyShardedPrecision, ddpkit::InvalidArgument, ddpkit::ProcessGroup;
using ddpkit::optim::FusedAdamW, ddpkit::optim::ShardedOptimizer;
using ddpkit::testing::backward_alone, ddpkit::testing::largest_difference, ddpkit::testing::LossModel;
using ddpkit::testing::maker, ddpkit::testing::MakeModel, ddpkit::testing::Mlp, ddpkit::testing::Transformer;

namespace {

constexpr int kPrecisionSteps = 20;
const auto kPrecisionAdamW = torch::optim::AdamWOptions(1e-2).weight_decay(0.1).eps(1e-3);

/// Float32 weights, and a copy of the model that computes with `precision`.
struct RoundingProcess {
  RoundingProcess(const MakeModel& make, const FullyShardedPrecision& types)
      : precision(types), rounded(make()), optimizer(copies_of(*make()), kPrecisionAdamW) {
    if (precision.param_dtype) rounded->to(*precision.param_dtype);
  }
  static std::vector<at::Tensor> copies_of(const LossModel& model) {
    std::vector<at::Tensor> copies;
    for (const auto& parameter : model.parameters()) copies.push_back(parameter.detach().clone().requires_grad_());
    return copies;
  }
  std::vector<at::Tensor>& masters() { return optimizer.param_groups()[0].params(); }

  /// Returns the loss of `rank`.
  double train(int step, int ranks, int rank) {
    const auto parameters = rounded->parameters();
    double loss_of_rank = 0;
    std::vector<at::Tensor> sums(parameters.size());
    for (int r = 0; r < ranks; ++r) {
      {
        const torch::NoGradGuard no_grad;
        for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(masters()[i]);
      }
      rounded->zero_grad();
      at::Tensor input = rounded->input(step, r, at::kFloat);
      if (precision.param_dtype && input.is_floating_point()) input = input.to(*precision.param_dtype);
      const at::Tensor loss = rounded->forward(input);
      loss.backward();
      if (r == rank) loss_of_rank = loss.item<double>();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        const at::Tensor gradient =
            parameters[i].grad().to(precision.reduce_dtype.value_or(parameters[i].scalar_type()));
        sums[i] = sums[i].defined() ? sums[i] + gradient : gradient;
      }
    }
    for (std::size_t i = 0; i < sums.size(); ++i) masters()[i].mutable_grad() = (sums[i] / ranks).to(at::kFloat);
    optimizer.step();
    return loss_of_rank;
  }

  FullyShardedPrecision precision;
  std::shared_ptr<LossModel> rounded;
  FusedAdamW optimizer;
};

/// Returns the float32 elements of the optimizer's parameter `index` on all ranks, in memory order.
at::Tensor shards_of(const ProcessGroup& group, ShardedOptimizer<FusedAdamW>& optimizer, std::size_t index) {
  const at::Tensor piece = optimizer.param_groups()[0].params()[index].detach().contiguous();
  REQUIRE(piece.scalar_type() == at::kFloat);
  std::string all;
  for (const std::string& bytes :
       group.all_gather_bytes({static_cast<const char*>(piece.const_data_ptr()), piece.nbytes()}))
    all += bytes;
  const at::Tensor values = torch::empty({static_cast<std::int64_t>(all.size() / sizeof(float))});
  std::memcpy(values.data_ptr(), all.data(), all.size());
  return values;
}

void check_rounds_as_alone(ProcessGroup& group, const MakeModel& make, const FullyShardedPrecision& precision,
                           bool reshard = true) {
  RoundingProcess alone(make, precision);
  const auto model = make();
  FullyShardedDataParallel fsdp(model, group,
                                {.min_unit_mb = 0, .reshard_after_forward = reshard, .precision = precision});
  for (const auto& parameter : model->parameters())
    CHECK(parameter.scalar_type() == precision.param_dtype.value_or(at::kFloat));
  ShardedOptimizer<FusedAdamW> optimizer(fsdp, kPrecisionAdamW);
  for (int step = 0; step < kPrecisionSteps; ++step) {
    const at::Tensor loss = fsdp(model->input(step, group.rank(), at::kFloat));
    loss.backward();
    CHECK(std::abs(loss.item<double>() - alone.train(step, group.world_size(), group.rank())) < 1e-6);
    optimizer.step();
    optimizer.zero_grad();
  }
  for (std::size_t i = 0; i < alone.masters().size(); ++i) {
    INFO("parameter " << i);
    CHECK(largest_difference(shards_of(group, optimizer, i), alone.masters()[i].detach().flatten()) < 1e-6);
  }
}

void check_precisions(ProcessGroup& group) {
  // The order of a sum of three changes its rounding to few bits.
  if (group.world_size() == 2) {
    check_rounds_as_alone(group, maker<Transformer>(at::kFloat), {.param_dtype = at::kBFloat16});
    check_rounds_as_alone(group, maker<Mlp>(at::kFloat), {.param_dtype = at::kBFloat16}, /*reshard=*/false);
    check_rounds_as_alone(group, maker<Transformer>(at::kFloat), {.reduce_dtype = at::kBFloat16});
  }
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    INFO(c10::toString(dtype));
    const FullyShardedPrecision precision{.param_dtype = dtype, .reduce_dtype = at::kFloat};
    check_rounds_as_alone(group, maker<Transformer>(at::kFloat), precision);
    check_rounds_as_alone(group, maker<Mlp>(at::kFloat), precision);
  }
}

}  // namespace

TEST_CASE("fully sharded weights in bfloat16 train as one process that rounds", "[ranks][fsdp]") {
  for (const char* backend : {"shm", "gloo"})
    ddpkit::testing::on_ranks("fully sharded weights in bfloat16 train as one process that rounds", {1, 2, 3},
                              check_precisions, {.backend = backend});
}

RANK_TEST("the loss of fully sharded weights in bfloat16 is near that of float32", "[fsdp]", 2) {
  const auto make = maker<Transformer>(at::kFloat);
  const auto alone = make(), model = make();
  FusedAdamW reference(alone->parameters(), kPrecisionAdamW);
  FullyShardedDataParallel fsdp(model, group, {.min_unit_mb = 0, .precision = {.param_dtype = at::kBFloat16}});
  ShardedOptimizer<FusedAdamW> optimizer(fsdp, kPrecisionAdamW);
  double sum = 0, expected = 0;
  for (int step = 0; step < 2 * kPrecisionSteps; ++step) {
    const at::Tensor loss = fsdp(model->input(step % 4, group.rank(), at::kFloat));
    loss.backward();
    sum += loss.item<double>();
    optimizer.step();
    optimizer.zero_grad();
    expected += backward_alone(*alone, step % 4, group.world_size(), group.rank(), at::kFloat);
    reference.step();
    reference.zero_grad();
    CHECK(std::abs(sum - expected) < 0.02 * expected);
  }
}

RANK_TEST("without an optimizer fully sharded gradients have the type of the weights", "[fsdp]", 1, 2) {
  const auto model = maker<Mlp>(at::kFloat)();
  FullyShardedDataParallel fsdp(
      model, group, {.min_unit_mb = 0, .precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
  fsdp(model->input(0, group.rank(), at::kFloat)).backward();
  for (const auto& parameter : model->parameters()) CHECK(parameter.grad().scalar_type() == at::kBFloat16);
}

RANK_TEST("writes to fully sharded weights in bfloat16 keep the bits of all other weights", "[fsdp]", 1, 2) {
  const auto make = maker<Mlp>(at::kFloat);
  const auto model = make(), before = make();
  FullyShardedDataParallel fsdp(model, group, {.min_unit_mb = 0, .precision = {.param_dtype = at::kBFloat16}});
  ShardedOptimizer<FusedAdamW> optimizer(fsdp, kPrecisionAdamW);
  {
    const auto scope = fsdp.gathering();
    const torch::NoGradGuard no_grad;
    model->parameters()[0].select(0, 1).fill_(0.5);
  }
  {
    const auto whole = fsdp.whole();  // Counts as a write to all weights.
  }
  optimizer.step();  // Without gradients: the shards receive all writes.
  const torch::NoGradGuard no_grad;
  before->parameters()[0].select(0, 1).fill_(0.5);
  for (std::size_t i = 0; i < before->parameters().size(); ++i)
    CHECK(torch::equal(shards_of(group, optimizer, i), before->parameters()[i].flatten()));
  // Loading keeps the bits of float32 too.
  std::stringstream file;
  for (auto& parameter : before->parameters()) parameter.mul_(1.001);
  torch::save(before, file);
  {
    const auto whole = fsdp.whole();
    auto target = model;
    torch::load(target, file);
  }
  optimizer.step();
  for (std::size_t i = 0; i < before->parameters().size(); ++i)
    CHECK(torch::equal(shards_of(group, optimizer, i), before->parameters()[i].flatten()));
  for (const auto& parameter : model->parameters()) CHECK(parameter.scalar_type() == at::kBFloat16);
}

RANK_TEST("arguments of a fully sharded forward pass are cast, if wanted", "[fsdp]", 1, 2) {
  struct Probe : torch::nn::Module {
    Probe() : weight(register_parameter("weight", torch::ones({2}))) {}
    at::Tensor forward(const std::vector<at::Tensor>& floats, const at::Tensor& ids, double factor) {
      types = {floats[0].scalar_type(), ids.scalar_type()};
      return floats[0] * weight * factor;
    }
    at::Tensor weight;
    std::vector<at::ScalarType> types;
  };
  for (const bool casts : {true, false}) {
    const auto model = std::make_shared<Probe>();
    FullyShardedDataParallel fsdp(model, group,
                                  {.precision = {.param_dtype = at::kBFloat16, .cast_forward_inputs = casts}});
    fsdp(std::vector<at::Tensor>{torch::ones({2})}, torch::arange(2), 2.0).sum().backward();
    CHECK(model->types == std::vector{casts ? at::kBFloat16 : at::kFloat, at::kLong});
  }
  CHECK_THROWS_WITH(
      (FullyShardedDataParallel(std::make_shared<Probe>(), group, {.precision = {.param_dtype = at::kLong}})),
      ContainsSubstring("must have floating types"));
}
