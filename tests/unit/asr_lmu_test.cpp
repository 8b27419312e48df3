#include <torch/torch.h>

#include <cmath>

#include "asr/legendre_memory.h"
#include "asr/model.h"
#include "support/catch.h"

using asr::legendre_system;
using asr::LegendreMemory;

namespace {

// Returns a signal without frequencies above `hz` cycles per step.
at::Tensor smooth_signal(std::int64_t steps, double hz) {
  at::Tensor signal = torch::zeros({steps}, torch::kDouble);
  const at::Tensor t = torch::arange(steps, torch::kDouble);
  for (int i = 1; i <= 8; ++i) signal += torch::sin(t * (2 * M_PI * hz * i / 8) + 1.7 * i * i) / 8;
  return signal;
}

// Computes the memory by a product with its transfer function: Chilkuri and Eliasmith's equation 26.
at::Tensor by_fft(const at::Tensor& u, std::int64_t order, double theta) {
  const auto system = legendre_system(order, theta);
  std::vector<at::Tensor> impulse;
  at::Tensor state = system.b;
  for (std::int64_t t = 0; t < u.size(1); ++t) {
    impulse.push_back(state);
    state = torch::mv(system.a, state);
  }
  const std::int64_t length = 2 * u.size(1);
  const at::Tensor response = torch::fft::rfft(torch::stack(impulse), length, 0);  // [frequency, order]
  const at::Tensor spectrum = torch::fft::rfft(u.to(torch::kDouble), length, 1);   // [batch, frequency, channels]
  const at::Tensor product = response.unsqueeze(0).unsqueeze(3) * spectrum.unsqueeze(2);  // [batch, f, order, channels]
  return torch::fft::irfft(product, length, 1).slice(1, 0, u.size(1)).flatten(2);
}

// Returns the memories, read by the identity.
at::Tensor memories(LegendreMemory& memory, const at::Tensor& u) {
  const std::int64_t size = memory.order() * u.size(2);
  return memory.project(u, torch::eye(size), torch::zeros({size}));
}

}  // namespace

TEST_CASE("the parallel and the recurrent memory agree over 1,000 steps, and with the papers' FFT", "[asr]") {
  for (const std::int64_t steps : {1, 31, 32, 33, 1000, 1025, 2100}) {
    CAPTURE(steps);
    torch::manual_seed(1);
    LegendreMemory memory(16, 50);
    const at::Tensor u = torch::randn({2, steps, 3});
    const at::Tensor parallel = memories(memory, u);
    REQUIRE(parallel.sizes() == at::IntArrayRef({2, steps, 48}));
    CHECK((parallel - by_fft(u, 16, 50)).abs().max().item<double>() < 1e-4);
    at::Tensor state = torch::zeros({2, 16, 3});
    double apart = 0;
    for (std::int64_t t = 0; t < steps; ++t) {
      state = memory.step(u.select(1, t), state);
      apart = std::max(apart, (parallel.select(1, t) - state.flatten(1)).abs().max().item<double>());
    }
    CHECK(apart < 1e-4);
  }
}

TEST_CASE("the gradients of memory and linear layer are those of the recurrence", "[asr]") {
  for (const auto& [batch, steps] : {std::pair{1, 1}, std::pair{2, 70}, std::pair{1, 600}, std::pair{90, 100}}) {
    CAPTURE(batch, steps);
    torch::manual_seed(2);
    LegendreMemory memory(8, 20);
    const at::Tensor u = torch::randn({batch, steps, 2}), error = torch::randn({batch, steps, 5});
    const at::Tensor weight = torch::randn({5, 16}), bias = torch::randn({5});
    std::vector<at::Tensor> leaves, expected;
    for (const at::Tensor& tensor : {u, weight, bias}) {
      leaves.push_back(tensor.clone().requires_grad_());
      expected.push_back(tensor.to(torch::kDouble).requires_grad_());
    }
    (memory.project(leaves[0], leaves[1], leaves[2]) * error).sum().backward();
    const auto system = legendre_system(8, 20);
    at::Tensor state = torch::zeros({batch, 8, 2}, torch::kDouble), sum = torch::zeros({}, torch::kDouble);
    for (std::int64_t t = 0; t < steps; ++t) {
      state = torch::matmul(system.a, state) + system.b.unsqueeze(1) * expected[0].select(1, t).unsqueeze(1);
      sum = sum + ((torch::matmul(state.flatten(1), expected[1].t()) + expected[2]) * error.select(1, t)).sum();
    }
    sum.backward();
    for (std::size_t i = 0; i < 3; ++i) {
      const double largest = expected[i].grad().abs().max().item<double>();
      CHECK(largest > 0.01);
      CHECK((leaves[i].grad() - expected[i].grad()).abs().max().item<double>() < 1e-4 * largest);
    }
  }
}

TEST_CASE("the memory reconstructs its input, delayed by any part of its window", "[asr]") {
  // Voelker et al. 2019, equation 3: u(t - d) is the sum over i of P_i(d / theta) m_i(t), shifted Legendre polynomials.
  constexpr std::int64_t kOrder = 12, kSteps = 600;
  constexpr double kTheta = 100;
  const at::Tensor signal = smooth_signal(kSteps, 0.02);
  LegendreMemory memory(kOrder, kTheta);
  const at::Tensor m = memories(memory, signal.to(torch::kFloat).reshape({1, kSteps, 1}))[0].to(torch::kDouble);
  const double power = signal.square().mean().sqrt().item<double>();
  for (const int delay : {10, 25, 50, 75, 90}) {
    CAPTURE(delay);
    const double r = delay / kTheta;
    at::Tensor read = torch::zeros({kSteps}, torch::kDouble);
    double before = 1, polynomial = 2 * r - 1;  // P_0, P_1
    for (std::int64_t i = 0; i < kOrder; ++i) {
      read += m.select(1, i) * (i == 0 ? 1.0 : polynomial);
      if (i > 0) {
        const auto n = static_cast<double>(i);
        const double next = ((2 * n + 1) * (2 * r - 1) * polynomial - n * before) / (n + 1);
        before = polynomial;
        polynomial = next;
      }
    }
    const at::Tensor truth = signal.slice(0, 200 - delay, kSteps - delay);
    const double error = (read.slice(0, 200) - truth).square().mean().sqrt().item<double>();
    CHECK(error < 0.1 * power);
    // The signal of another time does not match.
    const at::Tensor now = signal.slice(0, 200);
    CHECK((read.slice(0, 200) - now).square().mean().sqrt().item<double>() > 0.5 * power);
  }
}

TEST_CASE("the zero-order hold is exact for a constant input", "[asr]") {
  // One step equals a thousand smaller steps.
  const auto system = legendre_system(4, 10);
  at::Tensor m = torch::zeros({4}, torch::kDouble);
  const auto fine = legendre_system(4, 10 * 1000.0);
  at::Tensor small = torch::zeros({4}, torch::kDouble);
  for (int t = 0; t < 7; ++t) {
    m = torch::mv(system.a, m) + system.b;
    for (int i = 0; i < 1000; ++i) small = torch::mv(fine.a, small) + fine.b;
  }
  CHECK((m - small).abs().max().item<double>() < 1e-9);
}

TEST_CASE("a model's stream gives what its forward gives, whatever the pieces", "[asr]") {
  torch::manual_seed(3);
  asr::Recognizer model(
      {.mels = 6, .width = 16, .strides = {2, 2}, .layers = 2, .memory_channels = 4, .order = 6, .theta = 9});
  model.eval();
  const torch::NoGradGuard no_grad;
  for (const std::int64_t frames : {1, 7, 160}) {
    const at::Tensor features = torch::randn({frames, 6});
    const at::Tensor whole = model.forward(features.unsqueeze(0))[0];
    REQUIRE(whole.size(0) == model.output_frames(frames));
    for (const std::int64_t piece : {1, 3, 50}) {
      CAPTURE(frames, piece);
      asr::StreamState state;
      std::vector<at::Tensor> parts;
      for (std::int64_t begin = 0; begin < frames; begin += piece)
        parts.push_back(model.stream(features.slice(0, begin, begin + piece), state));
      const at::Tensor streamed = torch::cat(parts);
      REQUIRE(streamed.sizes() == whole.sizes());
      CHECK((streamed - whole).abs().max().item<double>() < 1e-4);
    }
  }
}

TEST_CASE("padding of a batch does not change the samples", "[asr]") {
  torch::manual_seed(4);
  asr::Recognizer model({.mels = 6, .width = 16, .layers = 2, .memory_channels = 4, .order = 6, .theta = 9});
  model.eval();
  const at::Tensor features = torch::randn({1, 50, 6});
  const at::Tensor padded = torch::constant_pad_nd(features, {0, 0, 0, 83});
  const at::Tensor apart = model.forward(padded).slice(1, 0, model.output_frames(50)) - model.forward(features);
  CHECK(apart.abs().max().item<double>() < 1e-5);
}
