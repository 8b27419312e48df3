#include "clstm_ppo/normalizer.h"

#include <torch/serialize/archive.h>
#include <torch/torch.h>

namespace clstm_ppo {
namespace {

constexpr double kFarthest = 10;

at::Tensor sum_over_ranks(const at::Tensor& values, const ddpkit::ProcessGroup& group) {
  const at::Tensor sums = values.to(group.device());
  group.all_reduce(sums);
  return sums.cpu();
}

}  // namespace

RunningNormalizer::RunningNormalizer(std::int64_t size)
    : mean_(torch::zeros({size}, torch::kDouble)), variance_(torch::ones({size}, torch::kDouble)) {}

void RunningNormalizer::update(const at::Tensor& states, const ddpkit::ProcessGroup& group) {
  const at::Tensor rows = states.detach().to(torch::kCPU, torch::kDouble).reshape({-1, mean_.size(0)});
  // Two passes avoid cancellation: first the mean over all ranks, then the squared deviations from the mean.
  const at::Tensor rows_of_rank = torch::full({1}, static_cast<double>(rows.size(0)), torch::kDouble);
  const at::Tensor sums = sum_over_ranks(torch::cat({rows.sum(0), rows_of_rank}), group);
  const double count = sums[-1].item<double>();
  const at::Tensor mean = sums.slice(0, 0, -1) / count;
  const at::Tensor squares = sum_over_ranks((rows - mean).square().sum(0), group);
  const double all = count_ + count;
  const at::Tensor difference = mean - mean_;
  variance_ = (count_ * variance_ + squares + difference.square() * (count_ * count / all)) / all;
  mean_ = mean_ + difference * (count / all);
  count_ = all;
}

at::Tensor RunningNormalizer::operator()(const at::Tensor& states) const {
  const auto on_device = [&](const at::Tensor& numbers) { return numbers.to(states.device(), torch::kFloat); };
  return ((states - on_device(mean_)) * on_device((variance_ + 1e-12).rsqrt().clamp_max(1e6)))
      .clamp(-kFarthest, kFarthest);
}

void RunningNormalizer::save(torch::serialize::OutputArchive& archive) const {
  archive.write("count", torch::full({1}, count_, torch::kDouble), /*is_buffer=*/true);
  archive.write("mean", mean_, /*is_buffer=*/true);
  archive.write("variance", variance_, /*is_buffer=*/true);
}

void RunningNormalizer::load(torch::serialize::InputArchive& archive) {
  at::Tensor count;
  archive.read("count", count, /*is_buffer=*/true);
  archive.read("mean", mean_, /*is_buffer=*/true);
  archive.read("variance", variance_, /*is_buffer=*/true);
  count_ = count.item<double>();
}

}  // namespace clstm_ppo
