#include <ddpkit/error.h>
#include <ddpkit/optim/clip_grad_norm.h>
#include <torch/torch.h>

#include "support/catch.h"

using ddpkit::optim::clip_grad_norm_;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<torch::Tensor> with_gradients(torch::ScalarType dtype) {
  torch::manual_seed(4);
  std::vector<torch::Tensor> parameters;
  for (const std::vector<std::int64_t>& sizes :
       {std::vector<std::int64_t>{70001}, {3, 5}, {}, {0}, {40, 500}, {4, 6}}) {
    auto parameter = torch::zeros(sizes, dtype).requires_grad_(true);
    parameter.mutable_grad() = torch::randn(sizes, torch::kDouble).to(dtype);
    parameters.push_back(parameter);
  }
  // Transposed, and not dense.
  parameters[4].mutable_grad() = torch::randn({500, 40}, torch::kDouble).to(dtype).t();
  parameters[5].mutable_grad() = torch::randn({4, 12}, torch::kDouble).to(dtype).slice(1, 0, 12, 2);
  parameters.push_back(torch::zeros({3}, dtype).requires_grad_(true));  // No gradient.
  return parameters;
}

std::vector<torch::Tensor> gradients_of(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : parameters) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad().clone().to(torch::kDouble));
  }
  return gradients;
}

double largest(const torch::Tensor& tensor) { return tensor.abs().max().item<double>(); }

}  // namespace

TEST_CASE("clip_grad_norm_ equals LibTorch's", "[optim]") {
  for (const auto dtype : {torch::kDouble, torch::kFloat}) {
    for (const double order : {2.0, 1.0, kInfinity, 3.0, 0.5}) {
      for (const double max_norm : {0.1, 1e12}) {
        INFO("order " << order << ", max_norm " << max_norm);
        const auto ours = with_gradients(dtype), theirs = with_gradients(dtype);
        // LibTorch cannot compute the largest element of an empty gradient.
        if (order == kInfinity) theirs[3].mutable_grad() = torch::zeros({1}, dtype);
        const double expected = torch::nn::utils::clip_grad_norm_(theirs, max_norm, order);
        const double tolerance = dtype == torch::kDouble ? 1e-12 : 1e-5;
        CHECK(clip_grad_norm_(ours, max_norm, order) == Approx(expected).epsilon(tolerance));
        const auto a = gradients_of(ours), b = gradients_of(theirs);
        for (std::size_t i = 0; i < a.size(); ++i) {
          if (a[i].numel() > 0) CHECK(torch::allclose(a[i], b[i], tolerance, 0));
        }
      }
    }
  }
}

TEST_CASE("clip_grads_with_norm_ scales by a norm that is known", "[optim]") {
  const auto clipped = with_gradients(torch::kDouble);
  const auto before = gradients_of(clipped);
  ddpkit::optim::clip_grads_with_norm_(clipped, 1, 0.5);  // Nothing to do.
  CHECK(torch::equal(gradients_of(clipped)[0], before[0]));
  ddpkit::optim::clip_grads_with_norm_(clipped, 1, 4);
  for (std::size_t i = 0; i < before.size(); ++i) CHECK(torch::allclose(gradients_of(clipped)[i], before[i] / 4));
}

TEST_CASE("half types, complex and sparse gradients are clipped too", "[optim]") {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    const auto parameters = with_gradients(dtype);
    double squares = 0;
    for (const auto& gradient : gradients_of(parameters)) squares += gradient.square().sum().item<double>();
    CHECK(clip_grad_norm_(parameters, 1.0) == Approx(std::sqrt(squares)).epsilon(1e-6));
    CHECK(ddpkit::optim::grad_norm(parameters) == Approx(1.0).epsilon(1e-2));
  }
  auto complex = torch::zeros({2}, torch::kComplexDouble).requires_grad_(true);
  complex.mutable_grad() =
      torch::complex(torch::tensor({3.0, 0.0}), torch::tensor({4.0, 12.0})).to(torch::kComplexDouble);
  CHECK(clip_grad_norm_({complex}, 6.5) == Approx(13));
  CHECK(torch::allclose(torch::abs(complex.grad()), torch::tensor({2.5, 6.0}, torch::kDouble)));
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(5, 1).sparse(true));
  embedding(torch::tensor({1, 1, 2})).sum().backward();  // Index 1 occurs twice, index 2 once.
  CHECK(clip_grad_norm_(embedding->parameters(), 1.0) == Approx(std::sqrt(5.0)));
  CHECK(embedding->weight.grad().to_dense()[1].item<float>() == Approx(2 / std::sqrt(5.0)));
}

namespace {

/// Returns float16 gradients below the largest float16 number, 65504, whose norm is above it.
torch::Tensor with_large_norm(std::int64_t step) {
  auto parameter = torch::zeros({100}, torch::kHalf).requires_grad_(true);
  parameter.mutable_grad() = torch::full({100 * step}, 30000, torch::kHalf).slice(0, 0, 100 * step, step);
  return parameter;
}

void check_clipped_from_300000(const torch::Tensor& parameter) {
  CHECK(clip_grad_norm_({parameter}, 3000.0) == Approx(300000));
  CHECK(largest(parameter.grad()) == Approx(300).epsilon(1e-3));
}

}  // namespace

TEST_CASE("a norm of float16 gradients may exceed float16", "[optim]") {
  check_clipped_from_300000(with_large_norm(1));
}

// LibTorch's _foreach_norm, which handles gradients that are not dense, returns float16 by default.
TEST_CASE("a norm of float16 gradients with holes may exceed float16", "[optim]") {
  check_clipped_from_300000(with_large_norm(2));
}

TEST_CASE("norms of any order may exceed the gradients' type, and their powers too", "[optim]") {
  for (const auto& [dtype, value] :
       {std::pair{torch::kHalf, 60000.0}, {torch::kBFloat16, 1e30}, {torch::kFloat, 1e30}}) {
    auto parameter = torch::zeros({8}, dtype).requires_grad_(true);
    for (const double order : {1.0, 2.0, 3.0, 4.0, kInfinity}) {
      INFO(dtype << ", order " << order);
      parameter.mutable_grad() = torch::full({8}, value, dtype);
      const double expected = parameter.grad()[0].item<double>() * std::pow(8, 1 / order);
      CHECK(clip_grad_norm_({parameter}, expected / 2, order) == Approx(expected));
      CHECK(largest(parameter.grad()) == Approx(expected / std::pow(8, 1 / order) / 2).epsilon(1e-2));
    }
  }
}

TEST_CASE("the norm counts a weight under two names once", "[optim]") {
  auto parameter = torch::zeros({1}).requires_grad_(true);
  parameter.mutable_grad() = torch::full({1}, 4.0f);
  CHECK(ddpkit::optim::grad_norm({parameter, parameter}) == 4);
  CHECK(clip_grad_norm_({parameter, parameter}, 2.0) == 4);
  CHECK(largest(parameter.grad()) == Approx(2));
}

// Ranks whose parameters differ in strides must compute equal bits; otherwise their weights diverge.
TEST_CASE("the norm does not depend on the gradients' strides", "[optim]") {
  torch::manual_seed(3);
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kComplexFloat}) {
    const auto gradient = torch::randn({16, 8, 30, 30}, dtype == torch::kHalf ? torch::kFloat : dtype).to(dtype);
    auto parameter = torch::zeros_like(gradient).requires_grad_(true);
    const auto norm_of = [&](const torch::Tensor& values, double order) {
      parameter.mutable_grad() = values;
      return ddpkit::optim::grad_norm({parameter}, order);
    };
    for (const double order : {1.0, 2.0, 3.0, kInfinity}) {
      INFO(dtype << ", order " << order);
      const double expected = norm_of(gradient, order);
      CHECK(norm_of(gradient.contiguous(torch::MemoryFormat::ChannelsLast), order) == expected);
      CHECK(norm_of(gradient.permute({3, 2, 1, 0}).contiguous().permute({3, 2, 1, 0}), order) == expected);
      CHECK(norm_of(torch::stack({gradient, gradient}, -1).select(-1, 0), order) == expected);
      const int threads = at::get_num_threads();
      at::set_num_threads(threads == 1 ? 2 : 1);
      CHECK(norm_of(gradient, order) == expected);
      at::set_num_threads(threads);
    }
  }
}

TEST_CASE("norms that are not finite", "[optim]") {
  for (const float bad : {std::numeric_limits<float>::infinity(), NAN}) {
    for (const double order : {2.0, 1.0, kInfinity}) {
      auto parameters = with_gradients(torch::kFloat);
      parameters[0].mutable_grad()[50000] = bad;
      CHECK_THROWS_WITH(clip_grad_norm_(parameters, 1.0, order, true), ContainsSubstring("can't be clipped"));
      CHECK(parameters[1].grad().isfinite().all().item<bool>());
      const double norm = clip_grad_norm_(parameters, 1.0, order);
      if (std::isnan(bad))
        CHECK(std::isnan(norm));
      else
        CHECK(std::isinf(norm));
      // Python does the same: it multiplies all gradients by max_norm / norm.
      if (std::isinf(bad)) CHECK(parameters[1].grad().abs().max().item<float>() == 0);
      CHECK(std::isnan(parameters[0].grad()[50000].item<float>()));
    }
  }
  CHECK_THROWS_AS(clip_grad_norm_({}, 1.0, 0.0), ddpkit::InvalidArgument);
  CHECK(clip_grad_norm_({}, 1.0) == 0);
}
