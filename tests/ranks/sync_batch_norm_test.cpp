#include <torch/torch.h>

#include <sstream>

#include <ddpkit/error.h>
#include <ddpkit/optim/fused_sgd.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/parallel/sync_batch_norm.h>

#include "ranks/comparisons.h"
#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::ProcessGroup;
using ddpkit::SyncBatchNorm;
using ddpkit::testing::largest_difference;
using torch::nn::BatchNormOptions;

namespace {

constexpr std::int64_t kChannels = 5;

/// Returns the number of rows per rank. [rank]
std::vector<std::int64_t> even(int ranks) { return std::vector<std::int64_t>(static_cast<std::size_t>(ranks), 4); }
std::vector<std::int64_t> uneven(int ranks) {
  std::vector<std::int64_t> rows;
  for (int r = 0; r < ranks; ++r) rows.push_back(1 + 3 * r);
  return rows;
}
/// Rank 1 has no rows, if there is a rank 1.
std::vector<std::int64_t> one_empty(int ranks) {
  auto rows = uneven(ranks);
  rows[0] = 6;
  if (ranks > 1) rows[1] = 0;
  return rows;
}

std::int64_t total(const std::vector<std::int64_t>& rows) {
  return std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
}

torch::Tensor own_rows(const torch::Tensor& joined, const std::vector<std::int64_t>& rows, int rank) {
  return joined.split_with_sizes(rows)[static_cast<std::size_t>(rank)];
}

torch::Tensor joined_input(std::vector<std::int64_t> shape, std::int64_t seed) {
  torch::manual_seed(static_cast<std::uint64_t>(seed));
  // Far from zero mean: sums of squares would lose digits.
  return torch::randn(shape, torch::kDouble) * 3 + 100;
}

/// Runs LibTorch's batch norm on an input of any number of dimensions.
torch::Tensor reference_forward(torch::nn::BatchNorm1d& norm, const torch::Tensor& input) {
  if (input.dim() == 2) return norm(input);
  return norm(input.reshape({input.size(0), input.size(1), -1})).view(input.sizes());
}

void copy_parameters(torch::nn::Module& to, const torch::nn::Module& from) {
  const torch::NoGradGuard no_grad;
  for (const auto& item : from.named_parameters()) to.named_parameters()[item.key()].copy_(item.value());
}

/// Compares steps of synchronized batch norm on each rank's rows with plain batch norm on all rows.
void check_against_joined_batch(const ProcessGroup& group, BatchNormOptions options,
                                const std::vector<std::int64_t>& rows, const std::vector<std::int64_t>& trailing) {
  SyncBatchNorm sync(options, group);
  torch::nn::BatchNorm1d plain(options);
  sync->to(torch::kDouble);
  plain->to(torch::kDouble);
  if (options.affine()) {
    const torch::NoGradGuard no_grad;
    torch::manual_seed(3);
    plain->weight.normal_();
    plain->bias.normal_();
    copy_parameters(*sync, *plain);
  }
  std::vector<std::int64_t> shape{total(rows), options.num_features()};
  shape.insert(shape.end(), trailing.begin(), trailing.end());
  for (int step = 0; step < 3; ++step) {
    plain->zero_grad();
    sync->zero_grad();
    const auto joined = joined_input(shape, step).requires_grad_(true);
    const auto own = own_rows(joined.detach(), rows, group.rank()).clone().requires_grad_(true);
    const auto gradient = torch::randn(shape, torch::kDouble);
    const auto expected = reference_forward(plain, joined);
    const auto output = sync(own);
    CHECK(largest_difference(output, own_rows(expected, rows, group.rank())) < 1e-10);
    expected.backward(gradient);
    output.backward(own_rows(gradient, rows, group.rank()));
    CHECK(largest_difference(own.grad(), own_rows(joined.grad(), rows, group.rank())) < 1e-10);
    if (options.affine()) {
      // Each rank has the gradient of its rows; the sum over ranks is the gradient of the joined batch.
      for (const auto& [mine, theirs] : {std::pair{sync->weight, plain->weight}, std::pair{sync->bias, plain->bias}}) {
        const auto sum = mine.grad().clone();
        group.all_reduce(sum);
        CHECK(largest_difference(sum, theirs.grad()) < 1e-9);
      }
    }
  }
  if (options.track_running_stats()) {
    CHECK(largest_difference(sync->running_mean, plain->running_mean) < 1e-10);
    CHECK(largest_difference(sync->running_var, plain->running_var) < 1e-10);
    CHECK(sync->num_batches_tracked.item<std::int64_t>() == 3);
  }
  sync->eval();
  plain->eval();
  shape[0] = 4;
  const auto input = joined_input(shape, 10 + group.rank());
  CHECK(largest_difference(sync(input), reference_forward(plain, input)) < 1e-10);
}

}  // namespace

RANK_TEST("SyncBatchNorm equals batch norm over the joined batch", "[sync_batch_norm]", 1, 2, 3) {
  for (const auto& rows : {even(group.world_size()), uneven(group.world_size()), one_empty(group.world_size())}) {
    const bool one_value = total(rows) == 1;
    for (const std::vector<std::int64_t>& trailing :
         {std::vector<std::int64_t>{}, {7}, {3, 2}, {2, 3, 2}, {2, 1, 2, 3}}) {
      if (one_value && trailing.empty()) continue;
      check_against_joined_batch(group, BatchNormOptions(kChannels), rows, trailing);
    }
  }
}

RANK_TEST("SyncBatchNorm's options", "[sync_batch_norm]", 1, 2, 3) {
  for (const bool affine : {true, false}) {
    for (const bool track : {true, false}) {
      for (const std::optional<double> momentum : {std::optional<double>(0.3), std::optional<double>()}) {
        INFO("affine " << affine << ", track_running_stats " << track << ", momentum " << momentum.has_value());
        check_against_joined_batch(
            group, BatchNormOptions(kChannels).affine(affine).track_running_stats(track).momentum(momentum).eps(1e-3),
            one_empty(group.world_size()), {3});
      }
    }
  }
}

RANK_TEST("SyncBatchNorm of channels-last and of transposed inputs", "[sync_batch_norm]", 2, 3) {
  const auto rows = uneven(group.world_size());
  torch::nn::BatchNorm2d plain(kChannels);
  SyncBatchNorm sync(kChannels, group);
  plain->to(torch::kDouble);
  sync->to(torch::kDouble);
  for (const bool channels_last : {true, false}) {
    const auto base = joined_input({total(rows), kChannels, 6, 4}, 1);
    const auto arranged = [&](const torch::Tensor& x) {
      return channels_last ? x.contiguous(torch::MemoryFormat::ChannelsLast) : x.transpose(2, 3);
    };
    const auto joined = base.clone().requires_grad_(true);
    const auto own = own_rows(base, rows, group.rank()).clone().requires_grad_(true);
    const auto expected = plain(arranged(joined));
    const auto output = sync(arranged(own));
    CHECK(largest_difference(output, own_rows(expected, rows, group.rank())) < 1e-10);
    (expected * expected * expected).sum().backward();
    (output * output * output).sum().backward();
    CHECK(largest_difference(own.grad(), own_rows(joined.grad(), rows, group.rank())) < 1e-9);
  }
}

RANK_TEST("SyncBatchNorm of float and of half types, whose statistics are float", "[sync_batch_norm]", 2) {
  const auto rows = uneven(group.world_size());
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    torch::nn::BatchNorm1d plain(kChannels);
    SyncBatchNorm sync(kChannels, group);
    const auto values = ((joined_input({total(rows), kChannels, 50}, 1) - 100) / 3).to(dtype);
    const auto joined = values.clone().requires_grad_(true);
    const auto own = own_rows(values, rows, group.rank()).clone().requires_grad_(true);
    const auto expected = plain(joined);
    const auto output = sync(own);
    REQUIRE(output.scalar_type() == dtype);
    const double tolerance = dtype == torch::kFloat ? 1e-5 : 4e-2;
    const auto wide = [](const torch::Tensor& t) { return t.to(torch::kDouble); };
    CHECK(largest_difference(wide(output), wide(own_rows(expected, rows, group.rank()))) < tolerance);
    (wide(expected).pow(3) / 10).sum().backward();
    (wide(output).pow(3) / 10).sum().backward();
    CHECK(largest_difference(wide(own.grad()), wide(own_rows(joined.grad(), rows, group.rank()))) < tolerance);
    REQUIRE(sync->running_mean.scalar_type() == torch::kFloat);
    CHECK(largest_difference(sync->running_mean, plain->running_mean) < 1e-6);
    CHECK(largest_difference(sync->running_var, plain->running_var) < 1e-6);
    REQUIRE(sync->weight.grad().scalar_type() == torch::kFloat);
  }
}

RANK_TEST("gradients through SyncBatchNorm and DistributedDataParallel are those of the joined batch",
          "[sync_batch_norm][ddp]", 1, 2, 3) {
  struct Net : torch::nn::Module {
    Net() {
      first = register_module("first", torch::nn::Conv1d(3, kChannels, 3));
      norm = register_module("norm", SyncBatchNorm(kChannels));
      last = register_module("last", torch::nn::Linear(kChannels, 2));
      to(torch::kDouble);
    }
    torch::Tensor forward(const torch::Tensor& x) { return last(torch::relu(norm(first(x))).mean(2)); }
    torch::nn::Conv1d first{nullptr};
    SyncBatchNorm norm{nullptr};
    torch::nn::Linear last{nullptr};
  };
  const int ranks = group.world_size();
  torch::manual_seed(1);
  const auto alone = std::make_shared<Net>();
  torch::manual_seed(1);
  const auto model = std::make_shared<Net>();
  CHECK(ddpkit::convert_sync_batchnorm(model, group) == std::vector<std::string>{"norm"});
  // With small buckets, reductions of DDP and of batch norm alternate in backward.
  ddpkit::DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0.0001, .first_bucket_cap_mb = 0.0001});
  ddpkit::optim::FusedSGD own_optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD optimizer(alone->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 10; ++step) {
    torch::manual_seed(static_cast<std::uint64_t>(100 + step));
    const auto data = torch::randn({12, 3, 9}, torch::kDouble);
    const auto target = torch::randint(0, 2, {12});
    optimizer.zero_grad();
    torch::cross_entropy_loss(alone->forward(data), target).backward();
    own_optimizer.zero_grad();
    const auto part = [&](const torch::Tensor& t) { return t.chunk(ranks)[static_cast<std::size_t>(group.rank())]; };
    torch::cross_entropy_loss(ddp(part(data)), part(target)).backward();
    for (const auto& item : alone->named_parameters()) {
      INFO(item.key() << " in step " << step);
      CHECK(largest_difference(model->named_parameters()[item.key()].grad(), item.value().grad()) < 1e-10);
    }
    optimizer.step();
    own_optimizer.step();
  }
  for (const auto& item : alone->named_buffers())
    CHECK(largest_difference(model->named_buffers()[item.key()].to(torch::kDouble), item.value().to(torch::kDouble)) <
          1e-10);
}

RANK_TEST("a joined batch of one value a channel is refused on every rank", "[sync_batch_norm]", 2, 3) {
  SyncBatchNorm sync(kChannels, group);
  CHECK_THROWS_WITH(sync(torch::randn({group.rank() == 0 ? 1 : 0, kChannels})), ContainsSubstring("together have one"));
  // All ranks are empty: the running statistics do not change.
  CHECK(sync(torch::randn({0, kChannels})).sizes() == torch::IntArrayRef({0, kChannels}));
  CHECK(torch::equal(sync->running_mean, torch::zeros({kChannels})));
  CHECK(torch::equal(sync->running_var, torch::ones({kChannels})));
}

RANK_TEST("an input that SyncBatchNorm refuses on one rank is an error on all ranks", "[sync_batch_norm]", 2, 3) {
  SyncBatchNorm sync(BatchNormOptions(kChannels).momentum(std::nullopt), group);
  const auto refuse = [&](const torch::Tensor& wrong, const char* reason) {
    const bool is_wrong = group.rank() == 1;
    CHECK_THROWS_WITH(sync(is_wrong ? wrong : torch::randn({4, kChannels})),
                      ContainsSubstring(is_wrong ? reason : "rank 1 cannot use its input of SyncBatchNorm"));
  };
  refuse(torch::randn({4, kChannels + 1}), "expects an input of shape [N, 5, ...], but got [4, 6]");
  refuse(torch::randn({kChannels}), "but got [5]");
  refuse(torch::ones({4, kChannels}, torch::kLong), "Long");
  CHECK(sync->num_batches_tracked.item<std::int64_t>() == 0);
  CHECK(torch::equal(sync->running_mean, torch::zeros({kChannels})));
  sync(torch::randn({4, kChannels}));
  CHECK(sync->num_batches_tracked.item<std::int64_t>() == 1);
}

RANK_TEST("SyncBatchNorm refuses a second derivative", "[sync_batch_norm]", 2) {
  SyncBatchNorm sync(kChannels, group);
  const auto input = torch::randn({4, kChannels}).requires_grad_(true);
  CHECK_THROWS_WITH(torch::autograd::grad({sync(input).sum()}, {input}, {}, {}, /*create_graph=*/true),
                    ContainsSubstring("differentiated once only"));
}

RANK_TEST("a converted tree trains like one process on the joined batch", "[sync_batch_norm]", 1, 2, 3) {
  const auto build = [] {
    torch::manual_seed(2);
    torch::nn::Sequential net(torch::nn::Linear(3, kChannels), torch::nn::BatchNorm1d(kChannels), torch::nn::ReLU(),
                              torch::nn::Linear(kChannels, 4),
                              torch::nn::BatchNorm1d(BatchNormOptions(4).momentum({})));
    net->to(torch::kDouble);
    return net;
  };
  auto alone = build(), net = build();
  CHECK(ddpkit::convert_sync_batchnorm(net, group) == std::vector<std::string>{"1", "4"});
  const auto rows = one_empty(group.world_size());
  const auto joined = joined_input({total(rows), 3}, 5);
  const auto expected = alone->forward(joined);
  const auto output = net->forward(own_rows(joined, rows, group.rank()));
  CHECK(largest_difference(output, own_rows(expected, rows, group.rank())) < 1e-10);
  expected.pow(3).sum().backward();
  output.pow(3).sum().backward();
  for (const auto& item : alone->named_parameters()) {
    const auto sum = net->named_parameters()[item.key()].grad().clone();
    group.all_reduce(sum);
    CHECK(largest_difference(sum, item.value().grad()) < 1e-9 * (1 + item.value().grad().abs().max().item<double>()));
  }
  for (const auto& item : alone->named_buffers())
    CHECK(largest_difference(net->named_buffers()[item.key()].to(torch::kDouble), item.value().to(torch::kDouble)) <
          1e-10);
}
