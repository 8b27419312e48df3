#include <ddpkit/parallel/sync_batch_norm.h>

#include <ATen/ops/batch_norm.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <cmath>
#include <exception>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

#include "parallel/join.h"

namespace ddpkit {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Returns the type of statistics, as in batch norm.
at::ScalarType statistics_type(at::ScalarType input) {
  return input == at::kHalf || input == at::kBFloat16 ? at::kFloat : input;
}

/// Statistics of all ranks' values, by channel; the variance is biased. [channel]
struct JoinedStatistics {
  at::Tensor mean, variance;
  double count = 0;  ///< Values per channel.
};

void check_shape(const at::Tensor& input, std::int64_t channels) {
  if (input.dim() < 2 || input.size(1) != channels || channels == 0)
    throw InvalidArgument(fmt::format("SyncBatchNorm expects an input of shape [N, {}, ...], but got [{}]", channels,
                                      fmt::join(input.sizes(), ", ")));
}

/// Returns mean, biased variance and number of values of this rank. double [2 * channel + 1]
at::Tensor own_statistics(const at::Tensor& input, std::int64_t channels) {
  check_shape(input, channels);
  const auto options = input.options().requires_grad(false).dtype(at::kDouble);
  if (input.numel() == 0) return at::zeros({2 * channels + 1}, options);
  // Running statistics as arguments give half types statistics in float32. Momentum 0 leaves them unchanged.
  const at::Tensor unused = at::zeros({channels}, options.dtype(statistics_type(input.scalar_type())));
  const auto [mean, variance] = at::batch_norm_update_stats(input, unused, unused.clone(), 0.0);
  const auto count = static_cast<double>(input.numel() / channels);
  return at::cat({mean.to(at::kDouble), variance.to(at::kDouble), at::full({1}, count, options)});
}

[[noreturn]] void throw_refused_elsewhere(const at::Tensor& counts) {
  const int rank = static_cast<int>(counts.isnan().flatten().nonzero()[0].item<std::int64_t>());
  throw InvalidArgument(fmt::format("rank {0} cannot use its input of SyncBatchNorm: see the error of rank {0}", rank),
                        {.rank = rank, .call = "SyncBatchNorm"});
}

/// Collective. Each rank sends its mean, variance and count. All ranks combine them in rank order (Chan, Golub and
/// LeVeque, 1983), because differences of sums of squares would cancel. In double for every input type.
/// A rank that cannot use its input sends NaN as its count, so all ranks throw.
JoinedStatistics join_statistics(const at::Tensor& input, std::int64_t channels, const ProcessGroup& group) {
  at::Tensor own;
  std::exception_ptr refusal;
  try {
    own = own_statistics(input.detach(), channels);
  } catch (const std::exception&) {
    refusal = std::current_exception();
    own = at::full({2 * channels + 1}, std::nan(""), at::TensorOptions(at::kDouble).device(group.device()));
  }
  JoinContext::notify(group, JoinContext::Plain::kAllGather, own);
  const at::Tensor all = group.all_gather(own);                        // [rank][2 * channel + 1]
  const at::Tensor counts = all.select(1, 2 * channels).unsqueeze(1);  // [rank][1]
  const at::Tensor means = all.narrow(1, 0, channels);
  const double count = counts.sum().item<double>();
  if (refusal) std::rethrow_exception(refusal);
  if (std::isnan(count)) throw_refused_elsewhere(counts);
  // All inputs are empty: avoids a division by 0.
  const double divisor = count > 0 ? count : 1;
  const at::Tensor mean = (means * counts).sum(0) / divisor;
  const at::Tensor variance = ((all.narrow(1, channels, channels) + (means - mean).square()) * counts).sum(0) / divisor;
  const at::ScalarType dtype = statistics_type(input.scalar_type());
  return {mean.to(dtype), variance.to(dtype), count};
}

/// Computes (input - mean) / sqrt(variance + eps) * weight + bias with LibTorch's kernel.
at::Tensor normalize(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& mean,
                     const at::Tensor& variance, double eps) {
  return std::get<0>(at::native_batch_norm(input, weight, bias, mean, variance, /*training=*/false, 0.0, eps));
}

at::Tensor as_type(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() ? tensor.to(dtype) : tensor;
}

struct GroupCapsule : torch::CustomClassHolder {
  explicit GroupCapsule(ProcessGroup group) : group(std::move(group)) {}
  ProcessGroup group;
};

struct Normalize : torch::autograd::Function<Normalize> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias, const JoinedStatistics& statistics, double eps,
                            const ProcessGroup& group) {
    context->save_for_backward({input, weight.value_or(at::Tensor()), statistics.mean, statistics.variance});
    context->saved_data["count"] = statistics.count;
    context->saved_data["eps"] = eps;
    context->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<GroupCapsule>(group));
    if (input.numel() == 0) return at::empty_like(input);
    const at::ScalarType dtype = statistics.mean.scalar_type();
    return normalize(input, as_type(weight.value_or(at::Tensor()), dtype), as_type(bias.value_or(at::Tensor()), dtype),
                     statistics.mean, statistics.variance, eps);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    if (at::GradMode::is_enabled())
      throw InvalidArgument(
          "SyncBatchNorm can be differentiated once only, and backward was called with create_graph: use "
          "torch::nn::BatchNorm where gradients of gradients are wanted");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &mean = saved[2], &variance = saved[3];
    const double count = context->saved_data["count"].toDouble();
    const double eps = context->saved_data["eps"].toDouble();
    const auto capsule = context->saved_data["group"].toCapsule();
    const ProcessGroup& group = static_cast<const GroupCapsule&>(*capsule).group;

    // With the normalized value n = (x - mean) / s and s = sqrt(variance + eps), the gradients are
    //   bias: sum dy    weight: sum dy n    x: weight / s (dy - (joined sum dy + n * joined sum dy n) / count).
    // LibTorch's backward in eval mode computes both sums and the first term of the last gradient. Its forward computes
    // the rest.
    const bool wants_input = context->needs_input_grad(0);
    at::Tensor gradient, scaled_sum, sum;
    const at::Tensor wide_weight = as_type(weight, mean.scalar_type());
    const at::Tensor inverse_deviation = (variance + eps).rsqrt();
    if (input.numel() > 0) {
      std::tie(gradient, scaled_sum, sum) =
          at::native_batch_norm_backward(gradients[0].contiguous(input.suggest_memory_format()), input, wide_weight,
                                         mean, variance, /*save_mean=*/mean, /*save_invstd=*/inverse_deviation,
                                         /*train=*/false, eps, {wants_input, true, true});
    } else {
      gradient = at::zeros_like(input);
      scaled_sum = at::zeros_like(mean);
      sum = at::zeros_like(mean);
    }
    if (wants_input) {
      const std::int64_t channels = mean.numel();
      const at::Tensor joined = at::cat({scaled_sum, sum});
      JoinContext::notify(group, JoinContext::Plain::kAllReduce, joined);
      group.all_reduce(joined);
      if (input.numel() > 0) {
        at::Tensor factor = inverse_deviation / -count;
        if (wide_weight.defined()) factor.mul_(wide_weight);
        gradient.add_(normalize(input, joined.narrow(0, 0, channels) * factor,
                                joined.narrow(0, channels, channels) * factor, mean, variance, eps));
      }
    }
    const auto of_parameter = [&](std::size_t index, const at::Tensor& value) {
      return weight.defined() && context->needs_input_grad(index) ? value.to(weight.scalar_type()) : at::Tensor();
    };
    return {wants_input ? gradient : at::Tensor(), of_parameter(1, scaled_sum), of_parameter(2, sum), {}, {}, {}};
  }
};

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, std::optional<ProcessGroup> group)
    : options(options), group_(std::move(group)) {
  SyncBatchNormImpl::reset();
}

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, const BatchNormTensors& shared,
                                     std::optional<ProcessGroup> group)
    : options(options), group_(std::move(group)) {
  register_tensors(shared);
}

void SyncBatchNormImpl::reset() {
  BatchNormTensors fresh;
  if (options.affine()) {
    fresh.weight = at::ones({options.num_features()}).set_requires_grad(true);
    fresh.bias = at::zeros({options.num_features()}).set_requires_grad(true);
  }
  if (options.track_running_stats()) {
    fresh.running_mean = at::zeros({options.num_features()});
    fresh.running_var = at::ones({options.num_features()});
    fresh.num_batches_tracked = at::zeros({}, at::kLong);
  }
  register_tensors(fresh);
}

void SyncBatchNormImpl::register_tensors(const BatchNormTensors& tensors) {
  const auto parameter = [this](const char* name, const at::Tensor& tensor) {
    return register_parameter(name, tensor, tensor.defined() && tensor.requires_grad());
  };
  weight = parameter("weight", tensors.weight);
  bias = parameter("bias", tensors.bias);
  running_mean = register_buffer("running_mean", tensors.running_mean);
  running_var = register_buffer("running_var", tensors.running_var);
  num_batches_tracked = register_buffer("num_batches_tracked", tensors.num_batches_tracked);
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  const bool together = is_training() && group_ && group_->world_size() > 1;
  if (!together) check_shape(input, options.num_features());
  if (is_training() && !together && input.numel() == input.size(1))
    throw InvalidArgument(
        fmt::format("batch norm needs more than one value a channel to train, but got an input of [{}]",
                    fmt::join(input.sizes(), ", ")));
  const bool updates = is_training() && num_batches_tracked.defined();
  double momentum = options.momentum().value_or(0.0);
  // Without a momentum: the cumulative average over all batches.
  if (updates && !options.momentum()) momentum = 1.0 / (num_batches_tracked.item<double>() + 1);
  at::Tensor output = together ? forward_together(input, momentum)
                               : at::batch_norm(input, weight, bias, running_mean, running_var,
                                                is_training() || !running_mean.defined(), momentum, options.eps(),
                                                /*cudnn_enabled=*/true);
  if (updates) num_batches_tracked += 1;  // Last, so an error changes nothing.
  return output;
}

at::Tensor SyncBatchNormImpl::forward_together(const at::Tensor& input, double momentum) {
  JoinedStatistics statistics;
  {
    const at::NoGradGuard no_grad;
    statistics = join_statistics(input, options.num_features(), *group_);
    if (statistics.count == 1)
      throw InvalidArgument(fmt::format(
          "batch norm needs more than one value a channel to train, but the batches of all {} ranks together have one",
          group_->world_size()));
    if (running_mean.defined() && statistics.count > 0) {
      const double unbiased = statistics.count / (statistics.count - 1);
      running_mean.mul_(1 - momentum).add_(statistics.mean.to(running_mean.scalar_type()), momentum);
      running_var.mul_(1 - momentum).add_(statistics.variance.to(running_var.scalar_type()), momentum * unbiased);
    }
  }
  // An undefined tensor would count as an input of the graph.
  const auto optional = [](const at::Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; };
  return Normalize::apply(input, optional(weight), optional(bias), statistics, options.eps(), *group_);
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format("ddpkit::SyncBatchNorm({}, eps={}, momentum={}, affine={}, track_running_stats={}, ranks={})",
                        options.num_features(), options.eps(),
                        options.momentum() ? fmt::format("{}", *options.momentum()) : "None", options.affine(),
                        options.track_running_stats(), group_ ? group_->world_size() : 1);
}

}  // namespace ddpkit
