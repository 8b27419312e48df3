#include "kernels/reduce.h"

#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <random>

#include "kernels/variant.h"
#include "support/catch.h"
#include "support/drawn.h"
#include "support/seed.h"

using namespace ddpkit::kernels;
using ddpkit::testing::drawn;
using ddpkit::testing::same;

namespace {

struct Kernel {
  const char* name;
  bool (*reduce)(const ReduceArguments&);
};

/// Returns all variants that this processor can run, the baseline first.
std::vector<Kernel> variants() {
  std::vector<Kernel> kernels{{"baseline", &reduce<Variant::kBaseline>}};
#if defined(__x86_64__)
  if (variant() >= Variant::kAvx2) kernels.push_back({"avx2", &reduce<Variant::kAvx2>});
  if (variant() >= Variant::kAvx512) kernels.push_back({"avx512", &reduce<Variant::kAvx512>});
#elif defined(__aarch64__)
  if (variant() == Variant::kSve) kernels.push_back({"sve", &reduce<Variant::kSve>});
#endif
  return kernels;
}

at::Tensor numbers(at::ScalarType dtype, std::int64_t numel, std::int64_t seed) {
  torch::manual_seed(static_cast<std::uint64_t>(seed));
  if (dtype == at::kBool) return torch::randint(0, 2, {numel}, at::kByte).to(dtype);
  if (at::isFloatingType(dtype)) return torch::randn({numel}, at::kFloat).to(dtype);
  return torch::randint(0, 7, {numel}, at::kLong).to(dtype);
}

at::Tensor run(DataType dtype, Reduction op, const std::vector<at::Tensor>& inputs, const Kernel& kernel) {
  std::vector<const void*> pointers;
  for (const auto& input : inputs) pointers.push_back(input.const_data_ptr());
  // One more element at both ends, which the kernel must not change.
  const at::Tensor around = at::ones({inputs[0].numel() + 2}, inputs[0].options());
  at::Tensor output = around.narrow(0, 1, inputs[0].numel());
  void* outputs[] = {output.data_ptr()};
  REQUIRE(kernel.reduce({.dtype = dtype,
                         .op = op,
                         .numel = static_cast<std::size_t>(output.numel()),
                         .inputs = pointers.data(),
                         .input_count = pointers.size(),
                         .outputs = outputs,
                         .output_count = 1}));
  CHECK(around[0].item<double>() == 1);
  CHECK(around[around.numel() - 1].item<double>() == 1);
  return output;
}

at::Tensor run(DataType dtype, Reduction op, const std::vector<at::Tensor>& inputs) {
  return run(dtype, op, inputs, {"chosen", [](const ReduceArguments& arguments) { return reduce(arguments), true; }});
}

const std::vector<std::pair<DataType, at::ScalarType>> kTypes = {
    {DataType::kUInt8, at::kByte},        {DataType::kInt8, at::kChar},     {DataType::kInt16, at::kShort},
    {DataType::kInt32, at::kInt},         {DataType::kInt64, at::kLong},    {DataType::kFloat16, at::kHalf},
    {DataType::kBFloat16, at::kBFloat16}, {DataType::kFloat32, at::kFloat}, {DataType::kFloat64, at::kDouble},
    {DataType::kBool, at::kBool}};
constexpr const char* kReductionNames[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};

/// Returns LibTorch's result.
at::Tensor expected_of(Reduction op, const std::vector<at::Tensor>& inputs) {
  return ddpkit::testing::reduced(inputs, static_cast<ddpkit::ReduceOp>(op));
}

/// Returns whether the bits are equal or both values are NaN. The sign and payload of a NaN depend on the order of an
/// instruction's operands.
bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (!at::isFloatingType(a.scalar_type())) return a.equal(b);
  return same(a, b) && a.nan_to_num().signbit().equal(b.nan_to_num().signbit());
}

}  // namespace

TEST_CASE("kernels agree with LibTorch for every type and reduction", "[kernels]") {
  std::mt19937_64 random(ddpkit::testing::seed_of_this_run());
  constexpr std::size_t kCounts[] = {4, 5, 8, 17, 127, 255, 256, 911, 1100};
  constexpr std::int64_t kSizes[] = {1, 3, 15, 16, 17, 31, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 2049, 5000};
  const auto check = [&](DataType dtype, at::ScalarType scalar, Reduction op, std::size_t count, std::int64_t numel) {
    std::vector<at::Tensor> inputs;
    for (std::size_t r = 0; r < count; ++r) inputs.push_back(drawn(scalar, numel, random));
    const at::Tensor expected = expected_of(op, inputs);
    const at::Tensor baseline = run(dtype, op, inputs, variants()[0]);
    for (const Kernel& kernel : variants()) {
      INFO(kReductionNames[static_cast<int>(op)] << " of " << numel << " " << name_of(dtype) << " x" << count << ", "
                                                 << kernel.name);
      const at::Tensor result = run(dtype, op, inputs, kernel);
      CHECK(same(result, expected));
      CHECK(same_bits(result, baseline));
    }
  };
  for (const auto& [dtype, scalar] : kTypes) {
    for (int op = 0; op < static_cast<int>(std::size(kReductionNames)); ++op) {
      if (!supports(dtype, static_cast<Reduction>(op))) continue;
      for (int draw = 0; draw < 7; ++draw) {
        const std::size_t count =
            draw < 3 ? 1 + static_cast<std::size_t>(draw) : kCounts[random() % std::size(kCounts)];
        const std::int64_t numel = count > 20 ? kSizes[random() % 11] : kSizes[random() % std::size(kSizes)];
        check(dtype, scalar, static_cast<Reduction>(op), count, numel);
      }
    }
  }
}

TEST_CASE("a mean of integers is right though neither their sum nor their number fits their type", "[kernels]") {
  for (const auto& [dtype, scalar] : {kTypes[0], kTypes[1], kTypes[2]}) {
    for (const std::size_t count : {3, 128, 200, 256, 70000}) {
      CAPTURE(c10::toString(scalar), count);
      const std::vector<at::Tensor> inputs(count, at::full({3}, 100, scalar));
      CHECK(run(dtype, Reduction::kAvg, inputs).equal(inputs[0]));
    }
  }
}

TEST_CASE("reductions that a type does not have", "[kernels]") {
  CHECK_FALSE(supports(DataType::kFloat32, Reduction::kBand));
  CHECK_FALSE(supports(DataType::kBool, Reduction::kAvg));
}

TEST_CASE("a NaN on one rank reaches the result", "[kernels]") {
  const at::Tensor a = torch::tensor({1.0f, NAN}), b = torch::tensor({NAN, 1.0f});
  for (const Kernel& kernel : variants()) {
    for (const auto op : {Reduction::kSum, Reduction::kMin, Reduction::kMax, Reduction::kProduct})
      CHECK(run(DataType::kFloat32, op, {a, b}, kernel).isnan().all().item<bool>());
  }
}

TEST_CASE("a reduction in place writes all outputs", "[kernels]") {
  for (const Kernel& kernel : variants()) {
    for (const std::size_t count : {2u, 4u}) {
      INFO(kernel.name << " x" << count);
      std::vector<at::Tensor> tensors;
      std::vector<void*> pointers;
      at::Tensor sum = torch::zeros({3000});
      for (std::size_t r = 0; r < count; ++r) {
        tensors.push_back(numbers(at::kFloat, 3000, static_cast<std::int64_t>(r)));
        pointers.push_back(tensors.back().data_ptr());
        sum += tensors.back();
      }
      REQUIRE(kernel.reduce({.dtype = DataType::kFloat32,
                             .op = Reduction::kSum,
                             .numel = 3000,
                             .inputs = pointers.data(),
                             .input_count = count,
                             .outputs = pointers.data(),
                             .output_count = count}));
      for (const auto& tensor : tensors) CHECK(at::equal(tensor, sum));
    }
  }
}

TEST_CASE("a reduction copies something else on the way, and nothing beyond its end", "[kernels]") {
  for (const auto& [dtype, scalar] : kTypes) {
    for (const std::int64_t numel : {1, 511, 512, 513, 5000}) {
      const at::Tensor a = numbers(scalar, numel, 1), b = numbers(scalar, numel, 2), other = numbers(scalar, numel, 3);
      const at::Tensor sum = at::zeros({numel + 1}, scalar), copy = at::zeros({numel + 1}, scalar);
      const void* inputs[] = {a.const_data_ptr(), b.const_data_ptr()};
      void* outputs[] = {sum.data_ptr()};
      for (const Kernel& kernel : variants()) {
        INFO(name_of(dtype) << " numel " << numel << ", " << kernel.name);
        sum.zero_();
        copy.zero_();
        REQUIRE(kernel.reduce({.dtype = dtype,
                               .op = Reduction::kSum,
                               .numel = static_cast<std::size_t>(numel),
                               .inputs = inputs,
                               .input_count = 2,
                               .outputs = outputs,
                               .output_count = 1,
                               .copy_from = other.const_data_ptr(),
                               .copy_to = copy.data_ptr()}));
        CHECK(at::equal(sum.narrow(0, 0, numel), run(dtype, Reduction::kSum, {a, b})));
        CHECK(at::equal(copy.narrow(0, 0, numel), other));
        CHECK(sum[numel].item<double>() == 0);
        CHECK(copy[numel].item<double>() == 0);
      }
    }
  }
}
