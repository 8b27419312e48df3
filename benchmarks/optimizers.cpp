// Google Benchmark of one optimizer step on the parameters of an MLP: 561 inputs, four hidden layers of 1,500 (7.6 M
// parameters) or three of 128 (106 k), 6 classes. Compare ns_per_element. `limit_adam` and `limit_sgd` read and write
// the same memory as the update, with almost no arithmetic. If there is a GPU, "gpu/" has the same benchmarks on it;
// their limit is a copy of the same number of bytes.
#include <benchmark/benchmark.h>
#include <torch/torch.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include <ddpkit/optim/clip_grad_norm.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_sgd.h>

#include "kernels/variant.h"

namespace {

torch::nn::Sequential mlp(std::int64_t hidden, int layers) {
  torch::nn::Sequential net;
  std::int64_t inputs = 561;
  for (int layer = 0; layer < layers; ++layer, inputs = hidden) {
    net->push_back(torch::nn::Linear(inputs, hidden));
    net->push_back(torch::nn::ReLU());
  }
  net->push_back(torch::nn::Linear(inputs, 6));
  return net;
}

/// Returns the parameters of the model that the benchmark's argument names, with gradients.
std::vector<torch::Tensor> parameters_of(const benchmark::State& state, torch::Device device = torch::kCPU) {
  torch::manual_seed(0);
  auto net = state.range(0) == 0 ? mlp(128, 3) : mlp(1500, 4);
  net->to(device);
  for (auto& parameter : net->parameters()) parameter.mutable_grad() = torch::randn_like(parameter) * 0.01;
  return net->parameters();
}

std::int64_t elements_of(const std::vector<torch::Tensor>& parameters) {
  std::int64_t count = 0;
  for (const auto& parameter : parameters) count += parameter.numel();
  return count;
}

void report(benchmark::State& state, std::int64_t elements, int bytes_per_element) {
  state.SetBytesProcessed(state.iterations() * elements * bytes_per_element);
  state.counters["parameters"] = static_cast<double>(elements);
  state.SetLabel(ddpkit::kernels::variant_name());
}

constexpr int kAdamBytes = 7 * 4;  // Reads parameter, gradient and two state tensors; writes all except the gradient.
constexpr int kSgdBytes = 5 * 4;   // With momentum.

template <class Optimizer, class Options>
void step(benchmark::State& state, const Options& options, int bytes_per_element) {
  const auto parameters = parameters_of(state);
  Optimizer optimizer(parameters, options);
  optimizer.step();
  for (auto _ : state) optimizer.step();
  report(state, elements_of(parameters), bytes_per_element);
}

template <class Optimizer>
void adamw(benchmark::State& state) {
  step<Optimizer>(state, torch::optim::AdamWOptions(1e-5), kAdamBytes);
}
BENCHMARK_TEMPLATE(adamw, torch::optim::AdamW)->Arg(0)->Arg(1);
BENCHMARK_TEMPLATE(adamw, ddpkit::optim::FusedAdamW)->Arg(0)->Arg(1);

template <class Optimizer>
void sgd_momentum(benchmark::State& state) {
  step<Optimizer>(state, torch::optim::SGDOptions(1e-5).momentum(0.9), kSgdBytes);
}
BENCHMARK_TEMPLATE(sgd_momentum, torch::optim::SGD)->Arg(0)->Arg(1);
BENCHMARK_TEMPLATE(sgd_momentum, ddpkit::optim::FusedSGD)->Arg(0)->Arg(1);

#if defined(__x86_64__)
#define DDPKIT_BEST_INSTRUCTIONS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DDPKIT_BEST_INSTRUCTIONS
#endif

DDPKIT_BEST_INSTRUCTIONS void add_to_three(float* a, float* b, float* c, const float* from, std::int64_t numel) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < numel; ++i) {
    a[i] += from[i];
    b[i] += from[i];
    c[i] += from[i];
  }
}

DDPKIT_BEST_INSTRUCTIONS void add_to_two(float* a, float* b, const float* from, std::int64_t numel) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < numel; ++i) {
    a[i] += from[i];
    b[i] += from[i];
  }
}

/// Reads the parameters, the gradients and `kStates` arrays of the same size; writes all except the gradients.
template <int kStates>
void limit(benchmark::State& state) {
  const auto parameters = parameters_of(state);
  std::vector<std::array<torch::Tensor, kStates>> states(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    for (auto& tensor : states[i]) tensor = torch::zeros_like(parameters[i]);
  }
  const auto data = [](const torch::Tensor& tensor) { return tensor.data_ptr<float>(); };
  for (auto _ : state) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& p = parameters[i];
      if constexpr (kStates == 2)
        add_to_three(data(p), data(states[i][0]), data(states[i][1]), data(p.grad()), p.numel());
      else
        add_to_two(data(p), data(states[i][0]), data(p.grad()), p.numel());
    }
    benchmark::ClobberMemory();
  }
  report(state, elements_of(parameters), (2 * (kStates + 1) + 1) * 4);
}
void limit_adam(benchmark::State& state) { limit<2>(state); }
void limit_sgd(benchmark::State& state) { limit<1>(state); }
BENCHMARK(limit_adam)->Arg(0)->Arg(1);
BENCHMARK(limit_sgd)->Arg(0)->Arg(1);

const torch::Device kGpu(torch::kCUDA, 0);
/// The host waits for the GPU once per this number of calls, as in training.
constexpr int kCallsPerWait = 50;

template <class Call>
void time_on_gpu(benchmark::State& state, const Call& call) {
  call();
  torch::cuda::synchronize();
  while (state.KeepRunningBatch(kCallsPerWait)) {
    for (int i = 0; i < kCallsPerWait; ++i) call();
    torch::cuda::synchronize();
  }
}

template <class Optimizer, class Options>
void step_on_gpu(benchmark::State& state, const Options& options, int bytes_per_element) {
  const auto parameters = parameters_of(state, kGpu);
  Optimizer optimizer(parameters, options);
  time_on_gpu(state, [&] { optimizer.step(); });
  state.SetBytesProcessed(state.iterations() * elements_of(parameters) * bytes_per_element);
}

void limit_on_gpu(benchmark::State& state, int bytes_per_element) {
  const std::int64_t bytes = elements_of(parameters_of(state)) * bytes_per_element;
  const auto options = torch::dtype(torch::kByte).device(kGpu);
  const auto from = torch::zeros({bytes / 2}, options), to = torch::empty_like(from);
  time_on_gpu(state, [&] { to.copy_(from); });
  state.SetBytesProcessed(state.iterations() * bytes);
}

void register_on_gpu() {
  const auto add = [](const std::string& name, auto function) {
    benchmark::RegisterBenchmark(("gpu/" + name).c_str(), function)->Arg(0)->Arg(1)->UseRealTime();
  };
  const auto adamw = torch::optim::AdamWOptions(1e-5);
  const auto sgd = torch::optim::SGDOptions(1e-5).momentum(0.9);
  add("adamw<torch::optim::AdamW>", [=](auto& state) { step_on_gpu<torch::optim::AdamW>(state, adamw, kAdamBytes); });
  add("adamw<ddpkit::optim::FusedAdamW>",
      [=](auto& state) { step_on_gpu<ddpkit::optim::FusedAdamW>(state, adamw, kAdamBytes); });
  add("limit_adam", [](auto& state) { limit_on_gpu(state, kAdamBytes); });
  add("sgd_momentum<torch::optim::SGD>", [=](auto& state) { step_on_gpu<torch::optim::SGD>(state, sgd, kSgdBytes); });
  add("sgd_momentum<ddpkit::optim::FusedSGD>",
      [=](auto& state) { step_on_gpu<ddpkit::optim::FusedSGD>(state, sgd, kSgdBytes); });
  add("limit_sgd", [](auto& state) { limit_on_gpu(state, kSgdBytes); });
}

/// Computes only the norm; the limit is too high to clip.
void clip_libtorch(benchmark::State& state) {
  const auto parameters = parameters_of(state);
  for (auto _ : state) benchmark::DoNotOptimize(torch::nn::utils::clip_grad_norm_(parameters, 1e9));
  report(state, elements_of(parameters), 4);
}
void clip_ddpkit(benchmark::State& state) {
  const auto parameters = parameters_of(state);
  for (auto _ : state) benchmark::DoNotOptimize(ddpkit::optim::clip_grad_norm_(parameters, 1e9));
  report(state, elements_of(parameters), 4);
}
BENCHMARK(clip_libtorch)->Arg(0)->Arg(1);
BENCHMARK(clip_ddpkit)->Arg(0)->Arg(1);

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  if (torch::cuda::is_available()) register_on_gpu();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
}
