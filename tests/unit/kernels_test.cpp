#include "comm/shm/kernels.h"

#include <torch/torch.h>

#include "support/catch.h"

using namespace ddpkit::shm;

namespace {

at::Tensor numbers(at::ScalarType dtype, std::int64_t numel, std::int64_t seed) {
  torch::manual_seed(static_cast<std::uint64_t>(seed));
  if (dtype == at::kBool) return torch::randint(0, 2, {numel}, at::kByte).to(dtype);
  if (at::isFloatingType(dtype)) return torch::randn({numel}, at::kFloat).to(dtype);
  return torch::randint(0, 7, {numel}, at::kLong).to(dtype);
}

at::Tensor run(DataType dtype, Reduction op, const std::vector<at::Tensor>& inputs) {
  std::vector<const void*> pointers;
  for (const auto& input : inputs) pointers.push_back(input.const_data_ptr());
  at::Tensor output = at::empty_like(inputs[0]);
  void* outputs[] = {output.data_ptr()};
  reduce({.dtype = dtype,
          .op = op,
          .numel = static_cast<std::size_t>(output.numel()),
          .inputs = pointers.data(),
          .input_count = pointers.size(),
          .outputs = outputs,
          .output_count = 1});
  return output;
}

const std::vector<std::pair<DataType, at::ScalarType>> kTypes = {
    {DataType::kUInt8, at::kByte},        {DataType::kInt8, at::kChar},     {DataType::kInt16, at::kShort},
    {DataType::kInt32, at::kInt},         {DataType::kInt64, at::kLong},    {DataType::kFloat16, at::kHalf},
    {DataType::kBFloat16, at::kBFloat16}, {DataType::kFloat32, at::kFloat}, {DataType::kFloat64, at::kDouble}};

}  // namespace

TEST_CASE("kernels agree with LibTorch for every type and reduction", "[kernels]") {
  for (const auto& [dtype, scalar] : kTypes) {
    for (const std::size_t count : {1u, 2u, 3u, 5u}) {
      for (const std::int64_t numel : {1, 15, 64, 1023, 1025, 5000}) {
        std::vector<at::Tensor> inputs;
        for (std::size_t r = 0; r < count; ++r) inputs.push_back(numbers(scalar, numel, static_cast<std::int64_t>(r)));
        // Sums of half types are formed in float32 and rounded once.
        const bool is_half = scalar == at::kHalf || scalar == at::kBFloat16;
        const auto wide = [&](const at::Tensor& t) { return is_half ? t.to(at::kFloat) : t; };
        at::Tensor sum = wide(inputs[0]).clone(), product = sum.clone(), low = sum.clone(), high = sum.clone();
        for (std::size_t r = 1; r < count; ++r) {
          sum += wide(inputs[r]);
          product *= wide(inputs[r]);
          low = at::minimum(low, wide(inputs[r]));
          high = at::maximum(high, wide(inputs[r]));
        }
        const at::Tensor mean = at::isFloatingType(scalar)
                                    ? sum / static_cast<double>(count)
                                    : at::div(sum, static_cast<std::int64_t>(count), "trunc").to(scalar);
        INFO(name_of(dtype) << " x" << count << " numel " << numel << " variant " << kernel_variant());
        CHECK(at::equal(run(dtype, Reduction::kSum, inputs), sum.to(scalar)));
        CHECK(at::equal(run(dtype, Reduction::kAvg, inputs), mean.to(scalar)));
        CHECK(at::equal(run(dtype, Reduction::kProduct, inputs), product.to(scalar)));
        CHECK(at::equal(run(dtype, Reduction::kMin, inputs), low.to(scalar)));
        CHECK(at::equal(run(dtype, Reduction::kMax, inputs), high.to(scalar)));
      }
    }
  }
}

TEST_CASE("bitwise kernels", "[kernels]") {
  const at::Tensor a = torch::tensor({1, 2, 3, 12}, at::kInt), b = torch::tensor({3, 3, 5, 10}, at::kInt);
  CHECK(at::equal(run(DataType::kInt32, Reduction::kBand, {a, b}), a.bitwise_and(b)));
  CHECK(at::equal(run(DataType::kInt32, Reduction::kBor, {a, b}), a.bitwise_or(b)));
  CHECK(at::equal(run(DataType::kInt32, Reduction::kBxor, {a, b}), a.bitwise_xor(b)));
  CHECK_FALSE(supports(DataType::kFloat32, Reduction::kBand));
}

TEST_CASE("truth values: a sum is any, a product is all", "[kernels]") {
  const at::Tensor a = torch::tensor({true, true, false, false}), b = torch::tensor({true, false, true, false});
  CHECK(at::equal(run(DataType::kBool, Reduction::kSum, {a, b}), a.logical_or(b)));
  CHECK(at::equal(run(DataType::kBool, Reduction::kProduct, {a, b}), a.logical_and(b)));
  CHECK_FALSE(supports(DataType::kBool, Reduction::kAvg));
}

TEST_CASE("a NaN on one rank reaches the result", "[kernels]") {
  const at::Tensor a = torch::tensor({1.0f, NAN}), b = torch::tensor({NAN, 1.0f});
  for (const auto op : {Reduction::kSum, Reduction::kMin, Reduction::kMax, Reduction::kProduct})
    CHECK(run(DataType::kFloat32, op, {a, b}).isnan().all().item<bool>());
}

TEST_CASE("a reduction in place writes all outputs", "[kernels]") {
  for (const std::size_t count : {2u, 4u}) {
    std::vector<at::Tensor> tensors;
    std::vector<void*> pointers;
    at::Tensor sum = torch::zeros({3000});
    for (std::size_t r = 0; r < count; ++r) {
      tensors.push_back(numbers(at::kFloat, 3000, static_cast<std::int64_t>(r)));
      pointers.push_back(tensors.back().data_ptr());
      sum += tensors.back();
    }
    reduce({.dtype = DataType::kFloat32,
            .op = Reduction::kSum,
            .numel = 3000,
            .inputs = pointers.data(),
            .input_count = count,
            .outputs = pointers.data(),
            .output_count = count});
    for (const auto& tensor : tensors) CHECK(at::equal(tensor, sum));
  }
}

TEST_CASE("a reduction copies something else on the way, and nothing beyond its end", "[kernels]") {
  for (const auto& [dtype, scalar] : kTypes) {
    for (const std::int64_t numel : {1, 511, 512, 513, 5000}) {
      const at::Tensor a = numbers(scalar, numel, 1), b = numbers(scalar, numel, 2), other = numbers(scalar, numel, 3);
      const at::Tensor sum = at::zeros({numel + 1}, scalar), copy = at::zeros({numel + 1}, scalar);
      const void* inputs[] = {a.const_data_ptr(), b.const_data_ptr()};
      void* outputs[] = {sum.data_ptr()};
      reduce({.dtype = dtype,
              .op = Reduction::kSum,
              .numel = static_cast<std::size_t>(numel),
              .inputs = inputs,
              .input_count = 2,
              .outputs = outputs,
              .output_count = 1,
              .copy_from = other.const_data_ptr(),
              .copy_to = copy.data_ptr()});
      INFO(name_of(dtype) << " numel " << numel);
      CHECK(at::equal(sum.narrow(0, 0, numel), run(dtype, Reduction::kSum, {a, b})));
      CHECK(at::equal(copy.narrow(0, 0, numel), other));
      CHECK(sum[numel].item<double>() == 0);
      CHECK(copy[numel].item<double>() == 0);
    }
  }
}
