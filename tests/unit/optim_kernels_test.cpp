// All instruction sets give the same bits. fused_optimizer_steps_test.cpp compares the results with LibTorch.
#include <torch/torch.h>

#include "kernels/optimizer.h"
#include "support/catch.h"
#include "tensor/parallel_for.h"

using namespace ddpkit::kernels;

namespace {

struct Kernels {
  const char* name;
  bool (*adam)(const AdamArguments&);
  bool (*sgd)(const SgdArguments&);
  bool (*norm)(NormArguments&);
  bool (*scale)(const ScaleArguments&);
};

template <Variant kVariant>
constexpr Kernels kernels_of(const char* name) {
  return {name, adam<kVariant>, sgd<kVariant>, norm<kVariant>, scale<kVariant>};
}

/// Returns the kernels that this processor can run, without the baseline.
std::vector<Kernels> others() {
  std::vector<Kernels> others;
#if defined(__x86_64__)
  if (variant() >= Variant::kAvx2) others.push_back(kernels_of<Variant::kAvx2>("avx2"));
  if (variant() >= Variant::kAvx512) others.push_back(kernels_of<Variant::kAvx512>("avx512"));
#elif defined(__aarch64__)
  if (variant() == Variant::kSve) others.push_back(kernels_of<Variant::kSve>("sve"));
#endif
  return others;
}

constexpr Kernels kBaseline = kernels_of<Variant::kBaseline>("baseline");
constexpr std::int64_t kNumel = 1003;

/// Returns all results of the kernels in sequence.
torch::Tensor results_of(const Kernels& kernels, DataType type, torch::ScalarType dtype) {
  torch::manual_seed(1);
  const auto numbers = [&] { return torch::randn({kNumel}).to(dtype); };
  const auto gradient = numbers();
  auto parameter = numbers(), exp_avg = numbers();
  auto exp_avg_sq = numbers().square(), max_exp_avg_sq = numbers().square(), buffer = numbers();
  std::vector<torch::Tensor> results;
  const auto keep = [&](const torch::Tensor& tensor) { results.push_back(tensor.to(torch::kDouble)); };
  for (const double weight_decay : {0.0, 0.1}) {
    for (const bool amsgrad : {false, true}) {
      kernels.adam({.dtype = type,
                    .numel = kNumel,
                    .parameter = parameter.data_ptr(),
                    .gradient = gradient.data_ptr(),
                    .exp_avg = exp_avg.data_ptr(),
                    .exp_avg_sq = exp_avg_sq.data_ptr(),
                    .max_exp_avg_sq = amsgrad ? max_exp_avg_sq.data_ptr() : nullptr,
                    .constants = {.beta1 = 0.9,
                                  .beta2 = 0.99,
                                  .eps = 1e-8,
                                  .decay = 0.99,
                                  .weight_decay = weight_decay,
                                  .step_size = 0.02,
                                  .inverse_root = 3.1,
                                  .gradient_factor = 0.7}});
      for (const auto& tensor : {parameter, exp_avg, exp_avg_sq, max_exp_avg_sq}) keep(tensor);
    }
  }
  for (const bool nesterov : {false, true}) {
    for (const bool first : {false, true}) {
      kernels.sgd({.dtype = type,
                   .numel = kNumel,
                   .parameter = parameter.data_ptr(),
                   .gradient = gradient.data_ptr(),
                   .momentum_buffer = buffer.data_ptr(),
                   .constants = {.lr = 0.1,
                                 .momentum = 0.9,
                                 .dampening = 0.1,
                                 .weight_decay = 0.01,
                                 .nesterov = nesterov,
                                 .first = first,
                                 .gradient_factor = 0.7}});
      for (const auto& tensor : {parameter, buffer}) keep(tensor);
    }
  }
  kernels.scale({.dtype = type, .numel = kNumel, .values = parameter.data_ptr(), .factor = 0.3});
  keep(parameter);
  for (const NormKind kind : {NormKind::kSquares, NormKind::kAbsolutes, NormKind::kLargest}) {
    NormArguments arguments{.dtype = type, .kind = kind, .numel = kNumel, .values = gradient.data_ptr()};
    kernels.norm(arguments);
    results.push_back(torch::full({1}, arguments.result, torch::kDouble));
  }
  return torch::cat(results);
}

/// The same for updates with master weights. Some parameters are not the rounded master weight.
torch::Tensor master_results_of(const Kernels& kernels, DataType type, torch::ScalarType dtype) {
  torch::manual_seed(2);
  auto master = torch::randn({kNumel}), exp_avg = torch::randn({kNumel}), exp_avg_sq = torch::rand({kNumel});
  auto max_exp_avg_sq = torch::rand({kNumel}), buffer = torch::randn({kNumel});
  auto parameter = master.to(dtype);
  const auto gradient = torch::randn({kNumel}).to(dtype);
  parameter.slice(0, 3, kNumel, 7).fill_(0.5);
  std::vector<torch::Tensor> results;
  const auto keep = [&](const torch::Tensor& tensor) { results.push_back(tensor.to(torch::kDouble)); };
  for (const bool amsgrad : {false, true}) {
    kernels.adam(
        {.dtype = type,
         .numel = kNumel,
         .parameter = parameter.data_ptr(),
         .gradient = gradient.data_ptr(),
         .exp_avg = exp_avg.data_ptr(),
         .exp_avg_sq = exp_avg_sq.data_ptr(),
         .max_exp_avg_sq = amsgrad ? max_exp_avg_sq.data_ptr() : nullptr,
         .master = master.data_ptr<float>(),
         .constants = {
             .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .decay = 0.99, .step_size = 0.02, .inverse_root = 3.1}});
    for (const auto& tensor : {parameter, master, exp_avg, exp_avg_sq, max_exp_avg_sq}) keep(tensor);
  }
  for (void* momentum_buffer : {static_cast<void*>(nullptr), buffer.data_ptr()}) {
    kernels.sgd({.dtype = type,
                 .numel = kNumel,
                 .parameter = parameter.data_ptr(),
                 .gradient = gradient.data_ptr(),
                 .momentum_buffer = momentum_buffer,
                 .master = master.data_ptr<float>(),
                 .constants = {.lr = 0.1, .momentum = 0.9}});
    for (const auto& tensor : {parameter, master, buffer}) keep(tensor);
  }
  return torch::cat(results);
}

}  // namespace

TEST_CASE("update kernels give the same bits with every instruction set", "[kernels][optim]") {
  for (const auto& [type, dtype] :
       {std::pair{DataType::kFloat32, torch::kFloat}, std::pair{DataType::kFloat64, torch::kDouble},
        std::pair{DataType::kBFloat16, torch::kBFloat16}, std::pair{DataType::kFloat16, torch::kHalf}}) {
    const auto expected = results_of(kBaseline, type, dtype);
    CHECK(expected.isfinite().all().item<bool>());
    for (const Kernels& kernels : others()) {
      INFO(kernels.name << " " << c10::toString(dtype));
      CHECK(torch::equal(results_of(kernels, type, dtype), expected));
    }
    if (size_of(type) != 2) continue;
    const auto with_master = master_results_of(kBaseline, type, dtype);
    for (const Kernels& kernels : others()) {
      INFO(kernels.name << " " << c10::toString(dtype) << ", master weights");
      CHECK(torch::equal(master_results_of(kernels, type, dtype), with_master));
    }
  }
}

TEST_CASE("parallel_for does each number once", "[kernels]") {
  const int before = at::get_num_threads();
  for (const int threads : {1, 4}) {
    at::set_num_threads(threads);
    for (const std::int64_t count : {0, 1, 7, 1000}) {
      std::vector<std::atomic<int>> seen(static_cast<std::size_t>(count));
      std::atomic<int> calls{0};
      ddpkit::simd::parallel_for(count, 10, [&](std::int64_t begin, std::int64_t end) {
        ++calls;
        for (std::int64_t i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
      });
      CHECK(std::all_of(seen.begin(), seen.end(), [](const auto& n) { return n == 1; }));
      // All of LibTorch's threads work if there is enough work.
      if (count == 1000) CHECK(calls == threads);
    }
  }
  at::set_num_threads(before);
}
