#include <torch/torch.h>

#include <algorithm>
#include <sstream>

#include <ddpkit/error.h>
#include <ddpkit/parallel/comm_hooks.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/parallel/power_sgd.h>

#include "ranks/comparisons.h"
#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::CommHook;
using ddpkit::DistributedDataParallel;
using ddpkit::ProcessGroup;
using ddpkit::comm_hooks::PowerSGD;
using ddpkit::comm_hooks::PowerSGDOptions;
using ddpkit::testing::check_same_bits_on_all_ranks;
using ddpkit::testing::flat_gradients;

namespace {

/// A task to learn: the sign of products of the inputs. A teacher network gives the labels.
struct StudentImpl : torch::nn::Module {
  StudentImpl() {
    torch::manual_seed(1);
    convolution = register_module("convolution", torch::nn::Conv1d(4, 16, 3));
    // Like CNNs: the weight's memory is dense, but not in the order of its dimensions.
    convolution->weight.set_data(convolution->weight.transpose(1, 2).contiguous().transpose(1, 2));
    first = register_module("first", torch::nn::Linear(16 * 6, 48));
    second = register_module("second", torch::nn::Linear(48, 48));
    third = register_module("third", torch::nn::Linear(48, 48));
    head = register_module("head", torch::nn::Linear(48, 4));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor y = torch::relu(convolution(x)).flatten(1);
    if (fails_at_convolution) y.register_hook(fail);
    for (auto& layer : {first, second, third}) y = torch::relu(layer.ptr()->forward(y));
    return head(y);
  }
  static void fail(const torch::Tensor&) { throw std::runtime_error("a backward that fails"); }

  bool fails_at_convolution = false;  ///< The next backward throws before the gradients of the convolution.
  torch::nn::Conv1d convolution{nullptr};
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr}, head{nullptr};
};
TORCH_MODULE(Student);

torch::Tensor batch_of(const ProcessGroup& group, int step) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 * step + group.rank()));
  return torch::randn({16, 4, 8});
}

torch::Tensor targets_of(const torch::Tensor& x) {
  return (x.select(1, 0).sum(1) > 0).to(torch::kLong) * 2 + (x.select(1, 1).sum(1) > 0).to(torch::kLong);
}

/// The gradient of its weight is x.
struct Product : torch::nn::Module {
  explicit Product(const torch::Tensor& value) { weight = register_parameter("weight", value); }
  torch::Tensor forward(const torch::Tensor& x) { return (weight * x).sum(); }
  torch::Tensor weight;
};

struct Training {
  Training(const ProcessGroup& group, const CommHook& hook, double bucket_mb = 25, double momentum = 0)
      : group(group),
        optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(momentum)),
        ddp(model, group, {.bucket_cap_mb = bucket_mb, .first_bucket_cap_mb = bucket_mb}) {
    if (hook) ddp.register_comm_hook(hook);
  }

  /// Returns the loss over all ranks' batches.
  double step(int number) {
    optimizer.zero_grad();
    const torch::Tensor x = batch_of(group, number);
    const torch::Tensor loss = torch::cross_entropy_loss(ddp(x), targets_of(x));
    loss.backward();
    gradients.push_back(flat_gradients(*model));
    optimizer.step();
    const torch::Tensor mean = loss.detach().reshape({1}).clone();
    group.all_reduce(mean, ddpkit::ReduceOp::kAvg);
    return mean.item<double>();
  }
  /// Runs a backward that throws on all ranks: after all gradients, or before the gradients of the convolution.
  void fail(int number, bool has_all_gradients) {
    optimizer.zero_grad();
    torch::Tensor x = batch_of(group, number).requires_grad_() * 1;
    if (has_all_gradients) x.register_hook(StudentImpl::fail);
    model->fails_at_convolution = !has_all_gradients;
    const torch::Tensor loss = torch::cross_entropy_loss(ddp(x), targets_of(x));
    model->fails_at_convolution = false;
    CHECK_THROWS_WITH(loss.backward(), "a backward that fails");
  }
  double steps(int begin, int end) {
    double loss = 0;
    for (int number = begin; number < end; ++number) loss = step(number);
    return loss;
  }

  ProcessGroup group;
  Student model;
  torch::optim::SGD optimizer;
  DistributedDataParallel<StudentImpl> ddp;
  std::vector<torch::Tensor> gradients;  ///< After each backward. [step]
};

}  // namespace

RANK_TEST("PowerSGD of full rank is the all-reduce, to rounding", "[power_sgd]", 2, 3) {
  for (const bool batch : {false, true}) {
    for (const double bucket_mb : {25.0, 0.005}) {
      Training without(group, nullptr, bucket_mb);
      // A min_compression_rate of 0 compresses even if that saves nothing.
      PowerSGD power_sgd(group, {.matrix_approximation_rank = 1000,
                                 .start_powerSGD_iter = 1,
                                 .min_compression_rate = 0,
                                 .batch_tensors_with_same_shape = batch});
      Training with(group, power_sgd, bucket_mb);
      without.steps(0, 6);
      with.steps(0, 6);
      CHECK(torch::equal(with.gradients[0], without.gradients[0]));  // Before compression starts.
      for (std::size_t step = 1; step < 6; ++step) {
        CHECK_FALSE(torch::equal(with.gradients[step], without.gradients[step]));
        CHECK(torch::allclose(with.gradients[step], without.gradients[step], 1e-3, 1e-5));
      }
      CHECK(power_sgd.iterations() == 6);
    }
  }
}

RANK_TEST("PowerSGD of full rank is the all-reduce after gradients of lower rank", "[power_sgd]", 2, 3) {
  const auto columns = [](torch::Tensor x, std::int64_t begin, std::int64_t end) {
    x.narrow(1, 0, begin).zero_();
    x.narrow(1, end, x.size(1) - end).zero_();
    return x;
  };
  const std::vector<std::vector<std::int64_t>> shapes{{2, 5}, {5, 2}, {2, 2}, {1, 4}, {3, 7}, {7, 3}};
  for (const torch::Dtype dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16}) {
    for (const auto& shape : shapes) {
      for (const bool warm_start : {false, true}) {
        torch::manual_seed(static_cast<std::uint64_t>(7 + group.rank()));
        const auto random = [&] { return torch::randn(shape, dtype); };
        const torch::Tensor row = torch::arange(1, shape[1] + 1).to(dtype);  // The same on all ranks.
        std::vector<torch::Tensor> gradients{
            columns(random(), 0, 1),         // An embedding that uses one row.
            columns(random(), 1, shape[1]),  // Uses the other rows.
            random(),
            torch::zeros(shape, dtype),
            random(),
        };
        // Rank 1 plus rounding errors. Some are almost parallel to any given direction.
        for (int i = 0; i < 30; ++i) gradients.push_back(random().narrow(1, 0, 1) * row);
        gradients.push_back(random());
        const auto model = std::make_shared<Product>(torch::zeros(shape, dtype));
        DistributedDataParallel ddp(model, group);
        ddp.register_comm_hook(PowerSGD(group, {.matrix_approximation_rank = 8,
                                                .start_powerSGD_iter = 0,
                                                .min_compression_rate = 1e-6,
                                                .warm_start = warm_start}));
        // Drops up to 8 rounding errors per column.
        const double tolerance = dtype == torch::kDouble ? 1e-13 : dtype == torch::kFloat ? 1e-5 : 0.2;
        for (std::size_t step = 0; step < gradients.size(); ++step) {
          model->zero_grad();
          ddp(gradients[step]).backward();
          const torch::Tensor mean = group.all_gather(gradients[step].to(torch::kDouble)).mean(0);
          const double off_by = (model->weight.grad() - mean).abs().max().item<double>();
          INFO(dtype << " " << torch::IntArrayRef(shape) << ", warm start " << warm_start << ", step " << step);
          CHECK(off_by <= tolerance * std::max(1.0, mean.abs().max().item<double>()));
        }
      }
    }
  }
}

RANK_TEST("PowerSGD of rank 1 sends little, deterministically, the same bits to all", "[power_sgd]", 2, 3) {
  for (const bool batch : {false, true}) {
    const auto run = [&](double bucket_mb) {
      PowerSGD power_sgd(group, {.start_powerSGD_iter = 2, .batch_tensors_with_same_shape = batch});
      Training training(group, power_sgd, bucket_mb);
      training.steps(0, 10);
      const auto stats = power_sgd.stats();
      CHECK(stats.numel_before_compression == static_cast<std::uint64_t>(8 * training.gradients[0].numel()));
      CHECK(stats.compress_rate() > 8);
      check_same_bits_on_all_ranks(group, torch::stack(training.gradients));
      return torch::stack(training.gradients);
    };
    const torch::Tensor first = run(25);
    CHECK(torch::equal(run(25), first));
    CHECK_FALSE(torch::equal(run(0.005)[9], first[9]));  // Each bucket has other random factors.
  }
}

RANK_TEST("PowerSGD: the next gradients include the error of compression", "[power_sgd]", 2, 3) {
  // The gradients are the same in each step, differ between ranks, and have full rank.
  torch::manual_seed(static_cast<std::uint64_t>(5 + group.rank()));
  const torch::Tensor own = torch::randn({24, 24});
  const torch::Tensor mean = group.all_gather(own).mean(0);
  const auto off_by = [&](bool use_error_feedback, int steps) {
    const auto model = std::make_shared<Product>(torch::zeros({24, 24}));
    DistributedDataParallel ddp(model, group);
    ddp.register_comm_hook(
        PowerSGD(group, {.start_powerSGD_iter = 0, .use_error_feedback = use_error_feedback, .warm_start = true}));
    torch::Tensor sum = torch::zeros({24, 24});
    for (int step = 0; step < steps; ++step) {
      model->zero_grad();
      ddp(own).backward();
      sum += model->weight.grad();
    }
    return ((sum / steps - mean).norm() / mean.norm()).item<double>();
  };
  CHECK(off_by(false, 400) > 0.5);
  CHECK(off_by(true, 400) < 0.1);
  CHECK(off_by(true, 800) < 0.6 * off_by(true, 400));  // The error feedback stays bounded, so its share decreases.
}

static void check_training_converges(ddpkit::ProcessGroup& group) {
  const auto losses = [&](const CommHook& hook) {
    Training training(group, hook, 25, 0.9);
    const double before = training.step(0);
    training.steps(1, 390);
    double after = 0;
    for (int step = 390; step < 400; ++step) after += training.step(step) / 10;
    return std::pair(before, after);
  };
  const auto [before, after] = losses(nullptr);
  CHECK(after < 0.5 * before);
  for (const std::int64_t rank : {1, 2, 4}) {
    INFO("rank " << rank);
    const auto [start, end] = losses(PowerSGD(group, {.matrix_approximation_rank = rank, .start_powerSGD_iter = 10}));
    CHECK(start == before);
    CHECK(end < 0.6 * start);
  }
  const auto [start, end] = losses(ddpkit::comm_hooks::fp16_compress_wrapper(
      PowerSGD(group, {.matrix_approximation_rank = 2, .start_powerSGD_iter = 10, .warm_start = false})));
  CHECK(end < 0.6 * start);
}

RANK_TEST("training with PowerSGD converges", "[power_sgd]", 2) { check_training_converges(group); }

RANK_TEST("training with PowerSGD converges on three ranks", "[power_sgd][.long]", 3) {
  check_training_converges(group);
}

RANK_TEST("PowerSGD resumes where it was saved", "[power_sgd]", 2, 3) {
  const PowerSGDOptions options{.matrix_approximation_rank = 2, .start_powerSGD_iter = 2};
  PowerSGD power_sgd(group, options);
  Training training(group, power_sgd);
  training.steps(0, 5);
  torch::serialize::OutputArchive out;
  power_sgd.save(out);
  std::stringstream stream;
  out.save_to(stream);
  std::vector<torch::Tensor> weights;
  for (const auto& parameter : training.model->parameters()) weights.push_back(parameter.detach().clone());
  training.steps(5, 9);

  PowerSGD resumed(group, options);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  resumed.load(in);
  CHECK(resumed.iterations() == 5);
  Training other(group, resumed);
  {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < weights.size(); ++i) other.model->parameters()[i].copy_(weights[i]);
  }
  other.steps(5, 9);
  for (std::size_t step = 0; step < 4; ++step) CHECK(torch::equal(other.gradients[step], training.gradients[step + 5]));

  // Without the learned state, the result differs.
  Training fresh(group, PowerSGD(group, {.matrix_approximation_rank = 2, .start_powerSGD_iter = 0}));
  {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < weights.size(); ++i) fresh.model->parameters()[i].copy_(weights[i]);
  }
  fresh.steps(5, 9);
  CHECK_FALSE(torch::equal(fresh.gradients[0], training.gradients[5]));
}

RANK_TEST("PowerSGD keeps nothing of a backward that throws", "[power_sgd]", 2, 3) {
  for (const bool batch : {false, true}) {
    for (const bool warm_start : {false, true}) {
      const PowerSGDOptions options{
          .start_powerSGD_iter = 2, .warm_start = warm_start, .batch_tensors_with_same_shape = batch};
      PowerSGD power_sgd(group, options);
      Training with(group, power_sgd, 0.005), without(group, PowerSGD(group, options), 0.005);
      for (int step = 0; step < 6; ++step) {
        with.fail(100 + step, step % 2 == 0);
        with.step(step);
        without.step(step);
        INFO("batch " << batch << ", warm start " << warm_start << ", step " << step);
        CHECK(power_sgd.iterations() == static_cast<std::uint64_t>(step + 1));
        REQUIRE(torch::equal(with.gradients.back(), without.gradients.back()));
      }
    }
  }
}

RANK_TEST("PowerSGD: a state of another rank or model is refused", "[power_sgd]", 2) {
  PowerSGD power_sgd(group);
  torch::serialize::OutputArchive out;
  power_sgd.save(out);
  std::stringstream stream;
  out.save_to(stream);
  const std::string bytes = group.all_gather_bytes(stream.str())[static_cast<std::size_t>(1 - group.rank())];
  std::stringstream others(bytes);
  torch::serialize::InputArchive in;
  in.load_from(others);
  CHECK_THROWS_WITH(power_sgd.load(in), ContainsSubstring("the state of rank " + std::to_string(1 - group.rank())));
  CHECK_THROWS_AS(PowerSGD(group, {.matrix_approximation_rank = 0}), ddpkit::InvalidArgument);

  const ProcessGroup own = ddpkit::testing::another_group(group, "other-model");
  PowerSGD shared(own, {.start_powerSGD_iter = 0});
  torch::nn::Linear first(40, 40), second(50, 40);
  DistributedDataParallel a(first, own), b(second, own);
  a.register_comm_hook(shared);
  b.register_comm_hook(shared);
  a(torch::ones({1, 40})).sum().backward();
  CHECK_THROWS_WITH(b(torch::ones({1, 50})).sum().backward(),
                    ContainsSubstring("weight") && ContainsSubstring("belongs to another model"));
  group.barrier();
}

RANK_TEST("PowerSGD: gradients of zero, and parameters used now and then", "[power_sgd]", 2, 3) {
  struct Gated : torch::nn::Module {
    Gated() {
      torch::manual_seed(2);
      always = register_module("always", torch::nn::Linear(20, 20));
      sometimes = register_module("sometimes", torch::nn::Linear(20, 20));
      never = register_module("never", torch::nn::Linear(20, 20));
    }
    torch::Tensor forward(const torch::Tensor& x, bool gate) {
      const torch::Tensor y = always->forward(x);
      return gate ? y + sometimes->forward(x) : y;
    }
    torch::nn::Linear always{nullptr}, sometimes{nullptr}, never{nullptr};
  };
  for (const std::int64_t rank : {1, 2, 3}) {
    const auto model = std::make_shared<Gated>();
    DistributedDataParallel ddp(model, group, {.find_unused_parameters = true});
    ddp.register_comm_hook(PowerSGD(group, {.matrix_approximation_rank = rank, .start_powerSGD_iter = 0}));
    for (int step = 0; step < 8; ++step) {
      model->zero_grad();
      const bool gate = step >= 4 && group.rank() == step % group.world_size();
      ddp(batch_of(group, step).flatten(1).narrow(1, 0, 20), gate).pow(2).sum().backward();
      INFO("rank " << rank << ", step " << step);
      CHECK(torch::isfinite(model->always->weight.grad()).all().item<bool>());
      CHECK_FALSE(model->never->weight.grad().defined());
      REQUIRE(model->sometimes->weight.grad().defined() == (step >= 4));
      if (step < 4) continue;
      CHECK(torch::isfinite(model->sometimes->weight.grad()).all().item<bool>());
      CHECK(model->sometimes->weight.grad().abs().max().item<double>() > 0);
      check_same_bits_on_all_ranks(group, model->sometimes->weight.grad());
    }
  }
}

RANK_TEST("PowerSGD refuses to keep the errors of two models in one object", "[power_sgd]", 2) {
  const auto own = ddpkit::testing::another_group(group, "two models");
  PowerSGD power_sgd(own, {.matrix_approximation_rank = 2, .start_powerSGD_iter = 0});
  const auto train = [&](const torch::nn::Linear& model) {
    DistributedDataParallel ddp(model, own);
    ddp.register_comm_hook(power_sgd);
    ddp(torch::ones({4, 20})).pow(2).sum().backward();
  };
  { train(torch::nn::Linear(20, 20)); }
  const torch::nn::Linear generator(20, 20), discriminator(20, 20);  // The previous model no longer exists.
  train(generator);
  train(generator);
  CHECK_THROWS_WITH(train(discriminator), ContainsSubstring("parameter weight belongs to another model"));
}
