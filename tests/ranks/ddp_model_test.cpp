// The model that DistributedDataParallel wraps: names, types and buffers, later loads into it, and models that DDP
// refuses.
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <sstream>
#include <string>

#include <ddpkit/error.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

#include "ranks/many_kinds.h"
#include "support/catch.h"
#include "support/folder.h"
#include "support/ranks.h"

using namespace ddpkit::testing;
using ddpkit::DistributedDataParallel;

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
  auto model = many_kinds(0), reference = many_kinds(0);
  for (const auto& net : {model, reference}) {
    for (auto& parameter : net->lstm->parameters()) parameter.requires_grad_(false);
  }
  DistributedDataParallel ddp(model, group);
  const Batch joined = joined_batch(0), batch = joined.part(group.rank(), group.world_size());
  loss_of(ddp(batch.data), batch).backward();
  loss_of(reference->forward(joined.data), joined).backward();
  for (const auto& item : reference->named_parameters()) {
    INFO(item.key());
    const torch::Tensor gradient = model->named_parameters()[item.key()].grad();
    CHECK(gradient.defined() != item.key().starts_with("lstm."));
    if (gradient.defined()) CHECK(largest_difference(gradient, item.value().grad()) < 1e-12);
  }
}

RANK_TEST("several types in one model", "[ddp]", 2, 3) {
  struct Mixed : torch::nn::Module {
    Mixed() {
      a = register_parameter("a", torch::ones({3}, torch::kFloat));
      b = register_parameter("b", torch::ones({3}, torch::kDouble));
      c = register_parameter("c", torch::ones({3}, torch::kBFloat16));
      d = register_parameter("d", torch::ones({3}, torch::kComplexDouble));
    }
    /// Each element has another small factor: the means over ranks are exact in every type.
    static torch::Tensor factors() { return torch::tensor({1.0, 2.0, 3.0}, torch::kDouble); }
    torch::Tensor forward(double x) {
      const torch::Tensor by = factors() * x;
      return (a * by).sum() + (b * by).sum() + (c * by).sum() + torch::real(d * torch::complex(by, 2 * by)).sum();
    }
    torch::Tensor a, b, c, d;
  };
  auto model = std::make_shared<Mixed>();
  DistributedDataParallel ddp(model, group);
  CHECK(ddp.reducer().buckets().size() == 4);
  ddp(1.0 + group.rank()).backward();
  const torch::Tensor mean = Mixed::factors() * ((group.world_size() + 1) / 2.0);
  for (const auto& parameter : {model->a, model->b, model->c})
    CHECK(largest_difference(parameter.grad().to(torch::kDouble), mean) < 1e-6);
  CHECK(largest_difference(model->d.grad(), torch::complex(mean, -2 * mean)) < 1e-12);
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
      // Forward updates buffers after the broadcast, so the last update is this rank's.
      reference(batch(step, broadcasts && step < 2 ? 0 : group.rank()));
    }
    CHECK(torch::equal(norm->running_mean, reference->running_mean));
    CHECK(torch::equal(norm->running_var, reference->running_var));
    CHECK(norm->num_batches_tracked.item<std::int64_t>() == 3);
    // DDP broadcasts no buffers while gradients accumulate, and none in evaluation.
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

RANK_TEST("buffers of types without arithmetic are broadcast", "[ddp]", 2) {
  for (const auto type : {at::kFloat8_e4m3fn, at::kUInt16, at::kBool, at::kComplexFloat}) {
    const auto values = [type](int rank) { return torch::tensor({1.0, 0.0, double(rank)}).to(type); };
    auto model = std::make_shared<torch::nn::LinearImpl>(2, 2);
    model->register_buffer("table", values(group.rank()));
    DistributedDataParallel ddp(model, group);
    const torch::Tensor buffer = model->buffers()[0];
    CHECK(torch::equal(buffer.view(at::kByte), values(0).view(at::kByte)));
    buffer.copy_(values(group.rank() + 1));
    ddp(torch::ones({1, 2}));
    CHECK(torch::equal(buffer.view(at::kByte), values(1).view(at::kByte)));
  }
}

RANK_TEST("a buffer that cannot be broadcast is named", "[ddp]", 2) {
  for (const torch::Tensor& buffer : {torch::eye(3).to_sparse(), torch::ones({3}, torch::kMeta)}) {
    auto model = std::make_shared<torch::nn::LinearImpl>(2, 2);
    model->register_buffer("table", buffer);
    CHECK_THROWS_WITH(DistributedDataParallel(model, group), ContainsSubstring("table is"));
    CHECK_NOTHROW(DistributedDataParallel(model, group, {.parameters_to_ignore = {"table"}}));
  }
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
  torch::load(model, path);  // Each parameter gets a new gradient accumulator, without DDP's hook.
  torch::manual_seed(static_cast<std::uint64_t>(10 + group.rank()));
  const auto input = torch::randn({4, 6});
  ddp(input).pow(2).mean().backward();
  auto alone = make();
  alone->forward(group.all_gather(input).flatten(0, 1)).pow(2).mean().backward();
  for (std::size_t i = 0; i < model->parameters().size(); ++i)
    CHECK(torch::allclose(model->parameters()[i].grad(), alone->parameters()[i].grad(), 1e-5, 1e-6));
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
  CHECK_THAT(message(frozen.ptr()), ContainsSubstring("requires_grad false"));
  group.barrier();
}

TEST_CASE("wrong options are refused", "[ddp]") {
  const auto group = ddpkit::init_process_group({.backend = "shm", .environment = ddpkit::LaunchEnvironment{}});
  torch::nn::Linear model(2, 2);
  CHECK_THROWS_WITH(DistributedDataParallel(model, group, {.bucket_cap_mb = 0}),
                    ContainsSubstring("bucket_cap_mb is 0"));
  CHECK_THROWS_AS(DistributedDataParallel(torch::nn::ReLU(), group), ddpkit::InvalidArgument);
}

RANK_TEST("batch norm: several forwards before one backward", "[ddp]", 1, 2, 3) {
  struct Norms : torch::nn::Module {
    Norms() {
      first = register_module("first", torch::nn::BatchNorm1d(4));
      second = register_module("second", torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(4).momentum(c10::nullopt)));
      frozen = register_module("frozen", torch::nn::BatchNorm1d(4));
      to(torch::kDouble);
      frozen->running_mean.fill_(0.5);
      frozen->eval();
    }
    torch::Tensor forward(const torch::Tensor& x) { return second(torch::tanh(frozen(torch::tanh(first(x))))); }
    void learn() {
      train();
      frozen->eval();
    }
    torch::nn::BatchNorm1d first{nullptr}, second{nullptr}, frozen{nullptr};
  };
  const auto batch = [](int number, int rank) {
    torch::manual_seed(static_cast<std::uint64_t>(number * 10 + rank));
    return torch::randn({8, 4}, torch::kDouble);
  };
  for (const bool evaluates : {false, true}) {
    CAPTURE(evaluates);
    const auto model = std::make_shared<Norms>();
    DistributedDataParallel ddp(model, group);
    std::vector<std::shared_ptr<Norms>> alone;
    for (int r = 0; r < group.world_size(); ++r) alone.push_back(std::make_shared<Norms>());
    for (int step = 0; step < 3; ++step) {
      const auto loss_of = [&](Norms& norms, int rank, const auto& forward) {
        torch::Tensor loss = torch::zeros({}, torch::kDouble);
        for (int part = 0; part < 3; ++part) {
          norms.learn();
          // Runs between training forwards and does not affect the loss.
          if (evaluates && part == 2) {
            norms.eval();
            (void)forward(batch(90 + step, rank));
            norms.learn();
          }
          loss = loss + (forward(batch(3 * step + part, rank)) * batch(50 + part, rank)).sum();
        }
        return loss;
      };
      // One process computes all ranks, rank 0 first: each forward starts from rank 0's buffers before that forward.
      std::vector<std::vector<torch::Tensor>> of_rank_0;  // Before each forward of rank 0. [forward][buffer]
      torch::Tensor expected = torch::zeros({4}, torch::kDouble);
      for (int r = 0; r < group.world_size(); ++r) {
        Norms& norms = *alone[static_cast<std::size_t>(r)];
        std::size_t forward_number = 0;
        const auto loss = loss_of(norms, r, [&](const torch::Tensor& x) {
          const torch::NoGradGuard no_grad;
          const std::size_t number = forward_number++;
          auto buffers = norms.buffers();
          if (r == 0) of_rank_0.emplace_back();
          for (std::size_t i = 0; i < buffers.size(); ++i) {
            if (r == 0)
              of_rank_0.back().push_back(buffers[i].clone());
            else if (norms.is_training())
              buffers[i].variable_data().copy_(of_rank_0[number][i]);
          }
          const torch::AutoGradMode on(true);
          return norms.forward(x);
        });
        norms.zero_grad();
        loss.backward();
        expected += norms.first->weight.grad() / group.world_size();
      }
      model->zero_grad();
      loss_of(*model, group.rank(), [&](const torch::Tensor& x) { return ddp(x); }).backward();
      CHECK(torch::allclose(model->first->weight.grad(), expected, 1e-10, 1e-12));
      Norms& own = *alone[static_cast<std::size_t>(group.rank())];
      for (std::size_t i = 0; i < own.buffers().size(); ++i)
        CHECK(torch::allclose(model->buffers()[i], own.buffers()[i], 1e-10, 1e-12));
    }
  }
}

RANK_TEST("a buffer that forward reads, and another forward overwrites, is an error of autograd", "[ddp]", 2) {
  // Each rank's forward writes and reads a buffer; backward reads the buffer again.
  struct Scaled : torch::nn::Module {
    Scaled() {
      weight = register_parameter("weight", torch::ones({2}));
      scale = register_buffer("scale", torch::ones({2}));
    }
    torch::Tensor forward(double value) {
      if (value != 0) {
        const torch::NoGradGuard no_grad;
        scale.fill_(value);
      }
      return weight * scale;
    }
    torch::Tensor weight, scale;
  };
  const auto model = std::make_shared<Scaled>();
  DistributedDataParallel ddp(model, group);
  const torch::Tensor first = ddp(2.0 + group.rank());
  const torch::Tensor second = ddp(0.0);  // Reads rank 0's values.
  CHECK(torch::equal(model->scale, torch::full({2}, 2.0)));
  if (group.rank() == 0) {
    CHECK_NOTHROW(torch::autograd::grad({first.sum()}, {model->weight}));
  } else {
    CHECK_THROWS_WITH(torch::autograd::grad({first.sum()}, {model->weight}), ContainsSubstring("inplace operation"));
  }
  // DDP does not write equal values.
  const torch::Tensor third = ddp(0.0);
  (second + third).sum().backward();
  CHECK(torch::equal(model->weight.grad(), torch::full({2}, 4.0)));
}
