#include <torch/torch.h>

#include <functional>
#include <memory>
#include <sstream>

#include <ddpkit/comm/error.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

#include "support/catch.h"
#include "support/folder.h"
#include "support/ranks.h"

using ddpkit::DistributedDataParallel;
using ddpkit::ProcessGroup;

namespace {

constexpr std::int64_t kBatch = 12;  // Divides evenly over 2, 3 and 4 ranks.

/// Encoder and decoder are one parameter under two names.
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    encoder = register_parameter("encoder", torch::randn({6, 5}));
    decoder = register_parameter("decoder", encoder);
    bias = register_parameter("bias", torch::zeros({6}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::tanh(x.matmul(encoder)).matmul(decoder.t()) + bias; }
  torch::Tensor encoder, decoder, bias;
};
TORCH_MODULE(Tied);

/// A convolution, batch norm in eval mode, an LSTM and tied weights, in double.
struct ManyKindsImpl : torch::nn::Module {
  explicit ManyKindsImpl(std::uint64_t seed) {
    torch::manual_seed(seed);
    convolution = register_module("convolution", torch::nn::Conv1d(3, 8, 3));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(8, 6).batch_first(true)));
    tied = register_module("tied", Tied());
    head = register_module("head", torch::nn::Linear(6, 4));
    norm->running_mean.normal_();
    norm->eval();
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto features = torch::relu(norm(convolution(x))).transpose(1, 2);
    const auto sequence = std::get<0>(lstm(features));
    return head(tied(sequence.select(1, -1)));
  }
  torch::nn::Conv1d convolution{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::LSTM lstm{nullptr};
  Tied tied{nullptr};
  torch::nn::Linear head{nullptr};
};

std::shared_ptr<ManyKindsImpl> many_kinds(std::uint64_t seed) {
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  auto model = std::make_shared<ManyKindsImpl>(seed);
  torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
  return model;
}

struct Batch {
  torch::Tensor data, target;
  Batch part(int rank, int ranks) const {
    return {data.chunk(ranks)[static_cast<std::size_t>(rank)], target.chunk(ranks)[static_cast<std::size_t>(rank)]};
  }
};

Batch joined_batch(std::int64_t step) {
  torch::manual_seed(static_cast<std::uint64_t>(10000 + step));
  return {torch::randn({kBatch, 3, 9}, torch::kDouble), torch::randint(0, 4, {kBatch})};
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                        std::vector<torch::Tensor> parameters) {
  if (name == "sgd")
    return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
  if (name == "adam") return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(1e-2));
  return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-2));
}

/// Each parameter once, a tied one too.
std::vector<torch::Tensor> unique_parameters(const torch::nn::Module& module) {
  std::vector<torch::Tensor> parameters;
  for (const auto& parameter : module.parameters()) {
    const bool seen =
        std::any_of(parameters.begin(), parameters.end(), [&](const auto& p) { return p.is_same(parameter); });
    if (!seen) parameters.push_back(parameter);
  }
  return parameters;
}

torch::Tensor flat(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> parts;
  for (const auto& tensor : tensors) parts.push_back(tensor.detach().reshape({-1}));
  return torch::cat(parts);
}

torch::Tensor flat_parameters(const torch::nn::Module& module) { return flat(unique_parameters(module)); }

torch::Tensor flat_gradients(const torch::nn::Module& module) {
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : unique_parameters(module)) gradients.push_back(parameter.grad());
  return flat(gradients);
}

double largest_difference(const torch::Tensor& a, const torch::Tensor& b) { return (a - b).abs().max().item<double>(); }

void check_same_bits_on_all_ranks(const ProcessGroup& group, const torch::Tensor& tensor) {
  const auto all = group.all_gather(tensor);
  for (int r = 1; r < group.world_size(); ++r) CHECK(torch::equal(all[r], all[0]));
}

torch::Tensor loss_of(const torch::Tensor& output, const Batch& batch) {
  return torch::cross_entropy_loss(output, batch.target);
}

/// `steps` of training on the joined batches in this process alone.
void train_alone(ManyKindsImpl& model, const std::string& optimizer_name, int steps) {
  auto optimizer = make_optimizer(optimizer_name, unique_parameters(model));
  for (int step = 0; step < steps; ++step) {
    const Batch batch = joined_batch(step);
    optimizer->zero_grad();
    loss_of(model.forward(batch.data), batch).backward();
    optimizer->step();
  }
}

}  // namespace

RANK_TEST("20 steps give the weights of one process on the joined batch", "[ddp]", 1, 2, 3, 4) {
  for (const std::string name : {"sgd", "adam", "adamw"}) {
    for (const double bucket_mb : {0.0005, 25.0}) {
      auto reference = many_kinds(0);
      train_alone(*reference, name, 20);

      // Other weights on every rank but the first: construction must give them
      // rank 0's.
      auto model = many_kinds(static_cast<std::uint64_t>(group.rank()));
      const torch::Tensor before = flat_parameters(*many_kinds(0));
      DistributedDataParallel ddp(model, group, {.bucket_cap_mb = bucket_mb, .first_bucket_cap_mb = bucket_mb});
      CHECK(torch::equal(flat_parameters(*model), before));
      std::size_t in_buckets = 0;
      for (const auto& bucket : ddp.reducer().buckets()) in_buckets += bucket.size();
      CHECK(in_buckets == unique_parameters(*model).size());  // A tied one once.
      auto optimizer = make_optimizer(name, unique_parameters(*model));
      for (int step = 0; step < 20; ++step) {
        const Batch batch = joined_batch(step).part(group.rank(), group.world_size());
        // Both kinds, in turn.
        optimizer->zero_grad(/*set_to_none=*/step % 2 == 0);
        loss_of(ddp(batch.data), batch).backward();
        optimizer->step();
      }
      INFO(name << ", buckets of " << bucket_mb << " MiB");
      CHECK(largest_difference(flat_parameters(*model), before) > 1e-3);
      CHECK(largest_difference(flat_parameters(*model), flat_parameters(*reference)) < 1e-10);
      check_same_bits_on_all_ranks(group, flat_parameters(*model));
    }
  }
}

RANK_TEST("the same bits in every run", "[ddp]", 2, 3) {
  const auto run = [&] {
    auto model = many_kinds(5);
    DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0.001, .first_bucket_cap_mb = 0.001});
    auto optimizer = make_optimizer("adam", unique_parameters(*model));
    for (int step = 0; step < 10; ++step) {
      const Batch batch = joined_batch(step).part(group.rank(), group.world_size());
      optimizer->zero_grad();
      loss_of(ddp(batch.data), batch).backward();
      optimizer->step();
    }
    return flat_parameters(*model);
  };
  const torch::Tensor first = run();
  CHECK(torch::equal(run(), first));
}

RANK_TEST(
    "gradient_as_bucket_view: gradients alias memory that is kept from "
    "step to step",
    "[ddp]", 2, 3) {
  auto model = many_kinds(0);
  DistributedDataParallel ddp(model, group, {.gradient_as_bucket_view = true, .arena = false});
  const auto backward = [&](int step) {
    const Batch batch = joined_batch(step).part(group.rank(), group.world_size());
    loss_of(ddp(batch.data), batch).backward();
  };
  backward(0);
  std::vector<void*> addresses;
  for (const auto& parameter : unique_parameters(*model)) {
    addresses.push_back(parameter.grad().data_ptr());
    CHECK(parameter.grad().storage().data() == unique_parameters(*model)[0].grad().storage().data());
    CHECK_FALSE(parameter.grad().is_view());
  }
  for (const bool set_to_none : {true, false}) {
    make_optimizer("sgd", unique_parameters(*model))->zero_grad(set_to_none);
    backward(1);
    for (std::size_t i = 0; i < addresses.size(); ++i)
      CHECK(unique_parameters(*model)[i].grad().data_ptr() == addresses[i]);
  }
}

RANK_TEST("without gradient_as_bucket_view each gradient is a tensor of its own", "[ddp]", 2, 3) {
  auto model = many_kinds(0);
  DistributedDataParallel ddp(model, group, {.arena = false});
  const auto backward = [&](int step) {
    const Batch batch = joined_batch(step).part(group.rank(), group.world_size());
    loss_of(ddp(batch.data), batch).backward();
  };
  backward(0);
  std::vector<torch::Tensor> held;
  std::vector<torch::Tensor> values;
  for (const auto& parameter : unique_parameters(*model)) {
    held.push_back(parameter.grad());
    values.push_back(parameter.grad().clone());
  }
  make_optimizer("sgd", unique_parameters(*model))->zero_grad(true);
  backward(1);
  // What somebody has kept of an earlier step stays as it was.
  for (std::size_t i = 0; i < held.size(); ++i) CHECK(torch::equal(held[i], values[i]));
}

RANK_TEST("gradient clipping sees the averaged gradient", "[ddp]", 2, 3) {
  auto reference = many_kinds(0);
  const Batch joined = joined_batch(0);
  loss_of(reference->forward(joined.data), joined).backward();
  const double expected = torch::nn::utils::clip_grad_norm_(unique_parameters(*reference), 0.01);

  auto model = many_kinds(0);
  DistributedDataParallel ddp(model, group);
  const Batch batch = joined.part(group.rank(), group.world_size());
  loss_of(ddp(batch.data), batch).backward();
  CHECK(torch::nn::utils::clip_grad_norm_(unique_parameters(*model), 0.01) == Approx(expected).epsilon(1e-10));
  CHECK(largest_difference(flat_gradients(*model), flat_gradients(*reference)) < 1e-12);
}

RANK_TEST("no_sync accumulates, and the next backward averages the sum", "[ddp]", 2, 3) {
  auto reference = many_kinds(0);
  for (int step = 0; step < 3; ++step) {
    const Batch joined = joined_batch(step);
    loss_of(reference->forward(joined.data), joined).backward();
  }

  auto model = many_kinds(0);
  DistributedDataParallel ddp(model, group);
  const auto backward = [&](int step) {
    const Batch batch = joined_batch(step).part(group.rank(), group.world_size());
    loss_of(ddp(batch.data), batch).backward();
  };
  {
    const auto guard = ddp.no_sync();
    backward(0);
    const torch::Tensor local = flat_gradients(*model);
    const auto all = group.all_gather(local);
    CHECK_FALSE(torch::equal(all[0], all[1]));
    backward(1);
  }
  backward(2);
  CHECK(largest_difference(flat_gradients(*model), flat_gradients(*reference)) < 1e-12);
  check_same_bits_on_all_ranks(group, flat_gradients(*model));
}

/// The same tensor becomes the gradient of `offset` and goes on to where the
/// gradient of `weight` is made of it.
struct HandsOnImpl : torch::nn::Module {
  HandsOnImpl() {
    weight = register_parameter("weight", torch::linspace(0.1, 1, 1024, torch::kDouble));
    offset = register_parameter("offset", torch::linspace(1, 2, 1024, torch::kDouble));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor product = weight.view({1, -1}) * x;
    if (between) product.register_hook([this](const torch::Tensor&) { between(); });
    return product + offset.view({1, -1});
  }
  torch::Tensor weight, offset;
  std::function<void()> between;
};

RANK_TEST("a gradient is not reduced where backward still reads it", "[ddp]", 2, 3) {
  for (const bool arena : {true, false}) {
    for (const bool as_view : {true, false}) {
      const auto model = std::make_shared<HandsOnImpl>();
      // Each parameter has a bucket of its own, that of `offset` being first.
      DistributedDataParallel ddp(
          model, group,
          {.bucket_cap_mb = 0.001, .first_bucket_cap_mb = 0.001, .gradient_as_bucket_view = as_view, .arena = arena});
      model->between = [&group] { group.barrier(); };  // By the end of it the first bucket has been reduced.
      const auto x = [](int rank) { return torch::full({1, 1024}, 1.0 + rank, torch::kDouble); };
      torch::Tensor of_weight = torch::zeros(1024, torch::kDouble), of_offset = of_weight.clone();
      for (int r = 0; r < group.world_size(); ++r) {
        const torch::NoGradGuard no_grad;
        const torch::Tensor twice = 2 * (model->weight * x(r)[0] + model->offset);
        of_offset += twice / group.world_size();
        of_weight += twice * x(r)[0] / group.world_size();
      }
      for (int step = 0; step < 2; ++step) {
        model->zero_grad();
        ddp(x(group.rank())).square().sum().backward();
        INFO("arena " << arena << ", gradient_as_bucket_view " << as_view << ", step " << step);
        CHECK(largest_difference(model->offset.grad(), of_offset) < 1e-10);
        CHECK(largest_difference(model->weight.grad(), of_weight) < 1e-10);
      }
    }
  }
}

/// Weights under two names, or used in two places: the products' gradients are
/// added up before they come to it.
struct TwiceImpl : torch::nn::Module {
  TwiceImpl() {
    weight = register_parameter("weight", torch::randn({64, 64}) / 8);
    register_parameter("again", weight);
    into = register_module("into", torch::nn::Linear(64, 64));
  }
  torch::Tensor forward(const torch::Tensor& x) { return into(torch::tanh(into(x).matmul(weight))).matmul(weight.t()); }
  torch::Tensor weight;
  torch::nn::Linear into{nullptr};
};

/// Blocks that a backward takes of the arena beyond those that it takes without
/// reducing anything.
template <class M>
std::uint64_t blocks_for_copies(const std::shared_ptr<M>& model, const ProcessGroup& group, const torch::Tensor& x,
                                bool accumulates) {
  DistributedDataParallel ddp(model, group);
  const auto blocks_taken = [&](bool synchronize) {
    if (!accumulates) model->zero_grad();
    const torch::Tensor loss = ddp(x).square().sum();
    const auto before = ddp.reducer().arena().value().allocations;
    if (synchronize) {
      loss.backward();
    } else {
      const auto local = ddp.no_sync();
      loss.backward();
    }
    return ddp.reducer().arena().value().allocations - before;
  };
  blocks_taken(true);  // The first one makes a new plan of buckets.
  const auto with = blocks_taken(true);
  return with - blocks_taken(false);
}

RANK_TEST("gradients that are a parameter's alone are not copied", "[ddp]", 1, 2) {
  for (const bool accumulates : {false, true}) {
    CAPTURE(accumulates);
    const auto mlp = std::make_shared<torch::nn::SequentialImpl>(
        torch::nn::Linear(64, 2048), torch::nn::ReLU(), torch::nn::LayerNorm(torch::nn::LayerNormOptions({2048})),
        torch::nn::Linear(2048, 1024));
    CHECK(blocks_for_copies(mlp, group, torch::randn({8, 64}), accumulates) == 0);
    const auto convolutions = std::make_shared<torch::nn::SequentialImpl>(
        torch::nn::Conv2d(3, 64, 5), torch::nn::BatchNorm2d(64), torch::nn::Conv2d(64, 32, 3));
    CHECK(blocks_for_copies(convolutions, group, torch::randn({2, 3, 12, 12}), accumulates) == 0);
    CHECK(blocks_for_copies(std::make_shared<TwiceImpl>(), group, torch::randn({8, 64}), accumulates) == 0);
  }
}

namespace {

/// A model whose gradient for inputs of `x` is x in every row.
std::shared_ptr<torch::nn::LinearImpl> rows_of_inputs() {
  return std::make_shared<torch::nn::LinearImpl>(torch::nn::LinearOptions(1024, 8).bias(false));
}

void check_average_of_inputs(DistributedDataParallel<torch::nn::LinearImpl>& ddp, const ProcessGroup& group) {
  const double rank = group.rank(), ranks = group.world_size();
  ddp(torch::full({1, 1024}, 1.0 + rank)).sum().backward();
  CHECK(largest_difference(ddp.module().weight.grad(), torch::full({8, 1024}, (ranks + 1) / 2)) < 1e-6);
}

}  // namespace

RANK_TEST("ranks let go of a wrapped model at different times", "[ddp]", 2, 3) {
  const auto first_model = rows_of_inputs(), second_model = rows_of_inputs();
  using Wrapped = DistributedDataParallel<torch::nn::LinearImpl>;
  auto first = std::make_unique<Wrapped>(first_model, group);
  check_average_of_inputs(*first, group);
  if (group.rank() == 1) first.reset();
  auto second = std::make_unique<Wrapped>(second_model, group);
  check_average_of_inputs(*second, group);
  first.reset();
  second_model->zero_grad();
  check_average_of_inputs(*second, group);
  second.reset();
  second_model->zero_grad();
  // All have let go of both: there may be an arena again.
  Wrapped third(second_model, group);
  CHECK(third.reducer().arena());
  check_average_of_inputs(third, group);
}

RANK_TEST("a gradient from an arena that another rank no longer maps", "[ddp]", 2) {
  const auto model = rows_of_inputs();
  using Wrapped = DistributedDataParallel<torch::nn::LinearImpl>;
  auto first = std::make_unique<Wrapped>(model, group);
  check_average_of_inputs(*first, group);
  first.reset();
  if (group.rank() == 1) model->zero_grad();  // Rank 0's stays in the first arena, and is added to.
  Wrapped second(model, group, {.arena = false});
  second(torch::full({1, 1024}, 1.0f)).sum().backward();
  CHECK(largest_difference(model->weight.grad(), torch::full({8, 1024}, 1.0 + 1.5 / 2)) < 1e-6);
}

RANK_TEST("torch::save of the bare module keeps its names", "[ddp]", 2) {
  auto model = many_kinds(static_cast<std::uint64_t>(group.rank()));
  DistributedDataParallel ddp(model, group);
  std::stringstream stream;
  torch::save(ddp.module_ptr(), stream);
  auto loaded = many_kinds(77);
  torch::load(loaded, stream);
  CHECK(torch::equal(flat_parameters(*loaded), flat_parameters(*many_kinds(0))));
}

RANK_TEST("parameters that want no gradient stay out of it", "[ddp]", 2, 3) {
  auto model = many_kinds(0);
  for (auto& parameter : model->lstm->parameters()) parameter.requires_grad_(false);
  DistributedDataParallel ddp(model, group);
  const Batch batch = joined_batch(0).part(group.rank(), group.world_size());
  loss_of(ddp(batch.data), batch).backward();
  CHECK_FALSE(model->lstm->parameters()[0].grad().defined());
  CHECK(model->head->weight.grad().defined());
}

RANK_TEST("several types in one model", "[ddp]", 2, 3) {
  struct Mixed : torch::nn::Module {
    Mixed() {
      a = register_parameter("a", torch::ones({3}, torch::kFloat));
      b = register_parameter("b", torch::ones({3}, torch::kDouble));
      c = register_parameter("c", torch::ones({3}, torch::kBFloat16));
      d = register_parameter("d", torch::ones({3}, torch::kComplexDouble));
    }
    torch::Tensor forward(double x) {
      return (a * x).sum().to(torch::kDouble) + (b * x).sum() + (c * x).sum().to(torch::kDouble) +
             torch::real(d * x).sum();
    }
    torch::Tensor a, b, c, d;
  };
  auto model = std::make_shared<Mixed>();
  DistributedDataParallel ddp(model, group);
  CHECK(ddp.reducer().buckets().size() == 4);
  ddp(static_cast<double>(group.rank())).backward();
  const double mean = (group.world_size() - 1) / 2.0;
  for (const auto& parameter : model->parameters())
    CHECK(torch::real(parameter.grad()).to(torch::kDouble).sub(mean).abs().max().item<double>() < 1e-2);
}

RANK_TEST("broadcast_buffers: a training forward starts from rank 0's buffers, or else from the rank's own", "[ddp]", 2,
          3) {
  for (const bool broadcasts : {true, false}) {
    torch::nn::BatchNorm1d norm(4), reference(4);
    DistributedDataParallel ddp(norm, group, {.broadcast_buffers = broadcasts});
    const auto batch = [](int step, int rank) {
      torch::manual_seed(static_cast<std::uint64_t>(step * 10 + rank));
      return torch::randn({8, 4});
    };
    for (int step = 0; step < 3; ++step) {
      ddp(batch(step, group.rank())).sum().backward();
      // Forward updates them after the broadcast: the last update is the rank's own.
      reference(batch(step, broadcasts && step < 2 ? 0 : group.rank()));
    }
    CHECK(torch::equal(norm->running_mean, reference->running_mean));
    CHECK(torch::equal(norm->running_var, reference->running_var));
    CHECK(norm->num_batches_tracked.item<std::int64_t>() == 3);
    // Neither while gradients only accumulate, nor in evaluation.
    const torch::Tensor own = norm->running_mean.clone();
    norm->eval();
    ddp(batch(3, group.rank()));
    CHECK(torch::equal(norm->running_mean, own));
    norm->train();
    const auto guard = ddp.no_sync();
    ddp(batch(4, group.rank()));
    reference(batch(4, group.rank()));
    CHECK(torch::equal(norm->running_mean, reference->running_mean));
  }
}

RANK_TEST("a parameter without a gradient is named, on the rank and to the others", "[ddp]", 2, 3) {
  struct Branches : torch::nn::Module {
    Branches() {
      used = register_module("used", torch::nn::Linear(2, 2));
      other = register_module("other", torch::nn::Linear(2, 2));
    }
    torch::Tensor forward(const torch::Tensor& x, bool both) { return both ? used(x) + other(x) : used(x); }
    torch::nn::Linear used{nullptr}, other{nullptr};
  };
  auto model = std::make_shared<Branches>();
  DistributedDataParallel ddp(model, group);
  const auto x = torch::randn({4, 2});
  ddp(x, true).sum().backward();
  try {
    ddp(x, group.rank() != 1).sum().backward();
    FAIL("threw nothing");
  } catch (const ddpkit::Error& error) {
    CHECK_THAT(error.what(), ContainsSubstring("rank 1"));
    CHECK_THAT(error.what(), ContainsSubstring("other.weight, other.bias"));
  }
}

RANK_TEST("a backward that throws half-way leaves the next one sound", "[ddp]", 2) {
  struct Failing : torch::autograd::Function<Failing> {
    static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) { return x.clone(); }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
      throw std::runtime_error("half-way");
    }
  };
  torch::manual_seed(0);
  torch::nn::Linear first(3, 3), second(3, 3);
  torch::nn::Sequential model(first, second);
  DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 100, .first_bucket_cap_mb = 100});
  const auto x = torch::full({2, 3}, group.rank() + 1.0);
  CHECK_THROWS_WITH(second(Failing::apply(first(x))).sum().backward(), ContainsSubstring("half-way"));
  model->zero_grad();
  ddp(x).sum().backward();
  check_same_bits_on_all_ranks(group, flat_gradients(*model));
}

RANK_TEST(
    "a model that differs between ranks is refused everywhere, with the "
    "parameter's name",
    "[ddp]", 2, 3) {
  const auto message = [&](const std::shared_ptr<torch::nn::Module>& module) -> std::string {
    try {
      DistributedDataParallel ddp(module, group);
    } catch (const ddpkit::ModelMismatch& error) {
      return error.what();
    }
    return "threw nothing";
  };
  const bool odd = group.rank() == group.world_size() - 1;
  const std::string last = std::to_string(group.world_size() - 1);
  CHECK_THAT(
      message(torch::nn::Linear(10, odd ? 6 : 5).ptr()),
      ContainsSubstring("rank 0 has parameter weight [5, 10] Float, rank " + last + " has parameter weight [6, 10]"));
  CHECK_THAT(message(torch::nn::Linear(torch::nn::LinearOptions(10, 5).bias(!odd)).ptr()),
             ContainsSubstring("rank 0 has parameter bias [5] Float, rank " + last + " has nothing more"));
  auto frozen = torch::nn::Linear(10, 5);
  if (odd) frozen->bias.requires_grad_(false);
  CHECK_THAT(message(frozen.ptr()), ContainsSubstring("wants no gradient"));
  group.barrier();
}

TEST_CASE("wrong options are refused", "[ddp]") {
  const auto group = ddpkit::init_process_group({.backend = "shm", .environment = ddpkit::LaunchEnvironment{}});
  torch::nn::Linear model(2, 2);
  CHECK_THROWS_WITH(DistributedDataParallel(model, group, {.bucket_cap_mb = 0}),
                    ContainsSubstring("bucket_cap_mb is 0"));
  CHECK_THROWS_AS(DistributedDataParallel(torch::nn::ReLU(), group), ddpkit::InvalidArgument);
}

TEST_CASE("DistributedDataParallel through gloo", "[ranks][gloo]") {
  ddpkit::testing::on_ranks("DistributedDataParallel through gloo", 2,
                            [](ProcessGroup& group) {
                              auto reference = many_kinds(0);
                              train_alone(*reference, "sgd", 5);
                              auto model = many_kinds(static_cast<std::uint64_t>(group.rank()));
                              DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0.001});
                              auto optimizer = make_optimizer("sgd", unique_parameters(*model));
                              for (int step = 0; step < 5; ++step) {
                                const Batch batch = joined_batch(step).part(group.rank(), group.world_size());
                                optimizer->zero_grad();
                                loss_of(ddp(batch.data), batch).backward();
                                optimizer->step();
                              }
                              CHECK(largest_difference(flat_parameters(*model), flat_parameters(*reference)) < 1e-10);
                            },
                            {.backend = "gloo"});
}

RANK_TEST("weights loaded after wrapping are trained together", "[ddp]", 2) {
  const ddpkit::testing::Folder folder;
  const auto make = [] {
    torch::manual_seed(5);
    return torch::nn::Sequential(torch::nn::Linear(6, 5), torch::nn::Tanh(), torch::nn::Linear(5, 2));
  };
  auto model = make();
  ddpkit::DistributedDataParallel ddp(model, group);
  const std::string path = (folder.path() / "weights.pt").string();
  torch::save(model, path);
  torch::load(model, path);  // Gives every parameter a new gradient accumulator, without our hook.
  torch::manual_seed(static_cast<std::uint64_t>(10 + group.rank()));
  const auto input = torch::randn({4, 6});
  ddp(input).pow(2).mean().backward();
  auto alone = make();
  alone->forward(group.all_gather(input).flatten(0, 1)).pow(2).mean().backward();
  for (std::size_t i = 0; i < model->parameters().size(); ++i)
    CHECK(torch::allclose(model->parameters()[i].grad(), alone->parameters()[i].grad(), 1e-5, 1e-6));
}
