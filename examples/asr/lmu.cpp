#include "asr/lmu.h"

#include <torch/torch.h>

#include <algorithm>

#include <ddpkit/optim/precision.h>

namespace asr {
namespace {

constexpr std::int64_t kChunk = 32;
constexpr std::int64_t kMostChunks = 32;  // Handed on by one product; beyond them the next 1,024 steps begin.

}  // namespace

LegendreSystem legendre_system(std::int64_t order, double theta) {
  // Together in one exponential: exp([A B; 0 0]) = [a b; 0 1].
  const at::Tensor continuous = torch::zeros({order + 1, order + 1}, torch::kDouble);
  auto value = continuous.accessor<double, 2>();
  for (std::int64_t i = 0; i < order; ++i) {
    const double scale = static_cast<double>(2 * i + 1) / theta;
    for (std::int64_t j = 0; j < order; ++j) value[i][j] = scale * (i < j || (i - j) % 2 == 0 ? -1 : 1);
    value[i][order] = scale * (i % 2 == 0 ? 1 : -1);
  }
  const at::Tensor discrete = torch::matrix_exp(continuous);
  return {.a = discrete.slice(0, 0, order).slice(1, 0, order).contiguous(),
          .b = discrete.slice(0, 0, order).select(1, order).contiguous()};
}

LegendreMemory::LegendreMemory(std::int64_t order, double theta) : order_(order) {
  const torch::NoGradGuard no_grad;
  const LegendreSystem system = legendre_system(order, theta);
  std::vector<at::Tensor> impulse, power;  // a^i b and a^(i + 1) for step i of a chunk.
  at::Tensor response = system.b, a = system.a;
  for (std::int64_t i = 0; i < kChunk; ++i) {
    impulse.push_back(response);
    power.push_back(a);
    response = torch::mv(system.a, response);
    a = torch::mm(system.a, a);
  }
  const at::Tensor toeplitz = torch::zeros({kChunk, order, kChunk}, torch::kDouble);  // [step, order, input]
  for (std::int64_t step = 0; step < kChunk; ++step) {
    for (std::int64_t input = 0; input <= step; ++input)
      toeplitz.select(0, step).select(1, input).copy_(impulse[static_cast<std::size_t>(step - input)]);
  }
  const at::Tensor from_state = torch::stack(power).reshape({kChunk * order, order});
  within_ = torch::cat({toeplitz.reshape({kChunk * order, kChunk}), from_state}, 1).to(torch::kFloat).contiguous();
  end_ = toeplitz.select(0, kChunk - 1).to(torch::kFloat).contiguous();
  std::vector<at::Tensor> powers = {torch::eye(order, torch::kDouble)};
  for (std::int64_t i = 0; i < kMostChunks; ++i) powers.push_back(torch::mm(powers.back(), power.back()));
  powers_ = torch::stack(powers).to(torch::kFloat);
  a_ = system.a.to(torch::kFloat);
  b_ = system.b.to(torch::kFloat);
}

void LegendreMemory::move_to(c10::Device device) {
  if (a_.device() == device) return;
  for (at::Tensor* tensor : {&a_, &b_, &within_, &end_, &powers_, &carry_}) {
    if (tensor->defined()) *tensor = tensor->to(device);
  }
}

// The state before each chunk from the state before the first and what each but the last chunk adds:
// [chunks * order, chunks * order].
const at::Tensor& LegendreMemory::carry(std::int64_t chunks) {
  if (!carry_.defined() || carry_.size(0) != chunks * order_) {
    carry_ = torch::zeros({chunks, order_, chunks, order_}, powers_.options());
    for (std::int64_t to = 0; to < chunks; ++to) {
      for (std::int64_t from = 0; from <= to; ++from) carry_.select(0, to).select(1, from).copy_(powers_[to - from]);
    }
    carry_ = carry_.reshape({chunks * order_, chunks * order_});
  }
  return carry_;
}

at::Tensor LegendreMemory::forward_from(const at::Tensor& u, const at::Tensor& state) {
  const std::int64_t batch = u.size(0), steps = u.size(1), channels = u.size(2);
  const std::int64_t chunks = (steps + kChunk - 1) / kChunk;
  const at::Tensor inputs =
      torch::constant_pad_nd(u, {0, 0, 0, chunks * kChunk - steps}).reshape({batch * chunks, kChunk, channels});
  // Every product has a constant on the left, the same for the whole batch, and leaves its result where it is wanted.
  const at::Tensor ends =
      torch::bmm(end_.expand({batch * chunks, order_, kChunk}), inputs).reshape({batch, chunks, order_, channels});
  const at::Tensor first =
      (state.defined() ? state : torch::zeros({batch, order_, channels}, u.options())).unsqueeze(1);
  const at::Tensor added =
      torch::cat({first, ends.slice(1, 0, chunks - 1)}, 1).reshape({batch, chunks * order_, channels});
  const at::Tensor states = torch::bmm(carry(chunks).expand({batch, chunks * order_, chunks * order_}), added);
  const at::Tensor both = torch::cat({inputs, states.reshape({batch * chunks, order_, channels})}, 1);
  return torch::bmm(within_.expand({batch * chunks, kChunk * order_, kChunk + order_}), both)
      .reshape({batch, chunks * kChunk, order_ * channels})
      .slice(1, 0, steps);
}

at::Tensor LegendreMemory::forward(const at::Tensor& u) {
  move_to(u.device());
  // Sums over hundreds of steps: a half-precision mantissa would lose them.
  const ddpkit::optim::Autocast off(u.device(), at::kBFloat16, {.enabled = false});
  const at::Tensor input = u.to(torch::kFloat);
  constexpr std::int64_t kSteps = kChunk * kMostChunks;
  if (u.size(1) <= kSteps) return forward_from(input, {});
  std::vector<at::Tensor> parts;
  at::Tensor state;
  for (std::int64_t begin = 0; begin < u.size(1); begin += kSteps) {
    parts.push_back(forward_from(input.slice(1, begin, begin + kSteps), state));
    state = parts.back().select(1, -1).reshape({u.size(0), order_, u.size(2)});
  }
  return torch::cat(parts, 1);
}

at::Tensor LegendreMemory::step(const at::Tensor& u, const at::Tensor& state) {
  move_to(u.device());
  return torch::matmul(a_, state) + b_.unsqueeze(1) * u.unsqueeze(1);
}

LmuLayerImpl::LmuLayerImpl(const LmuOptions& options) : options_(options), memory_(options.order, options.theta) {
  reset();
}

void LmuLayerImpl::reset() {
  const std::int64_t remembered = options_.order * options_.memory_channels;
  to_memory_ = register_module("to_memory", torch::nn::Linear(options_.width, options_.memory_channels));
  from_memory_ = register_module("from_memory", torch::nn::Linear(remembered, options_.width));
  direct_ = register_module("direct",
                            torch::nn::Linear(torch::nn::LinearOptions(options_.width, options_.width).bias(false)));
}

at::Tensor LmuLayerImpl::output(const at::Tensor& x, const at::Tensor& memory) {
  return torch::gelu(from_memory_(memory) + direct_(x));
}

at::Tensor LmuLayerImpl::forward(const at::Tensor& x) { return output(x, memory_.forward(to_memory_(x))); }

at::Tensor LmuLayerImpl::step(const at::Tensor& x, at::Tensor& state) {
  if (!state.defined())
    state = torch::zeros({x.size(0), options_.order, options_.memory_channels}, x.options().dtype(torch::kFloat));
  state = memory_.step(to_memory_(x), state);
  return output(x, state.flatten(1));
}

}  // namespace asr
