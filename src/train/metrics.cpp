#include <ddpkit/train/metrics.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace ddpkit::train {

IndexRange evaluation_share(std::int64_t size, int rank, int world_size) {
  const std::int64_t each = size / world_size;
  const std::int64_t extra = size % world_size;  // The first `extra` ranks take one more.
  const std::int64_t begin = rank * each + std::min<std::int64_t>(rank, extra);
  return {.begin = begin, .end = begin + each + (rank < extra ? 1 : 0)};
}

std::vector<double> sum_over_ranks(const std::vector<double>& values, const ProcessGroup& group) {
  const at::Tensor sums = at::tensor(values, at::kDouble).to(group.device());
  group.all_reduce(sums);
  const at::Tensor host = sums.cpu();
  return {host.const_data_ptr<double>(), host.const_data_ptr<double>() + host.numel()};
}

ClassificationMetrics::ClassificationMetrics(at::Device device)
    : sums_(at::zeros({3}, at::TensorOptions().dtype(at::kDouble).device(device))) {}

void ClassificationMetrics::add(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& mean_loss) {
  const at::NoGradGuard no_grad;
  const std::int64_t count = targets.size(0);
  sums_[0].add_(mean_loss.detach(), count);
  sums_[1].add_(logits.argmax(1).eq(targets).sum());
  sums_[2].add_(count);
}

ClassificationResult ClassificationMetrics::reduce(const ProcessGroup& group) const {
  const at::Tensor sums = sums_.clone();
  group.all_reduce(sums);
  const at::Tensor host = sums.cpu();
  const double* values = host.const_data_ptr<double>();
  return {.loss = values[0] / values[2],
          .accuracy = values[1] / values[2],
          .samples = static_cast<std::int64_t>(values[2])};
}

}  // namespace ddpkit::train
