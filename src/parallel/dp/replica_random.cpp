#include "parallel/dp/replica_random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

namespace ddpkit {
namespace {

/// A dispatch key before all others that LibTorch does not use. If it is enabled on a thread, random operators are
/// dispatched to it first; other operators skip it.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local ReplicaRandom* current = nullptr;

bool is_on_cpu(const torch::jit::Stack& stack, std::size_t arguments) {
  return std::all_of(stack.end() - static_cast<std::ptrdiff_t>(arguments), stack.end(), [](const c10::IValue& value) {
    return !value.isTensor() || !value.toTensor().defined() || value.toTensor().is_cpu();
  });
}

/// Passes this thread's generator to operators that received none.
void with_own_generator(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  if (current && is_on_cpu(*stack, arguments.size())) {
    const c10::TypePtr wanted = c10::OptionalType::create(c10::GeneratorType::get());
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      c10::IValue& value = *(stack->end() - static_cast<std::ptrdiff_t>(arguments.size() - i));
      if (value.isNone() && *arguments[i].type() == *wanted) value = current->generator();
    }
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

// Basic random operators of forward passes: dropout calls bernoulli_, randn calls normal_.
constexpr const char* kRandomOperators[] = {
    "bernoulli",
    "bernoulli.p",
    "bernoulli_.Tensor",
    "bernoulli_.float",
    "binomial",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "multinomial",
    "normal_",
    "normal.Tensor_float",
    "normal.float_Tensor",
    "normal.Tensor_Tensor",
    "poisson",
    "random_",
    "random_.from",
    "random_.to",
    "randperm.generator_out",
    "rrelu_with_noise",
    "rrelu_with_noise_",
    "uniform_",
    "_sample_dirichlet",
    "_standard_gamma",
};

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, library) {
  for (const char* name : kRandomOperators)
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&with_own_generator>());
}

}  // namespace

std::uint64_t ReplicaSeed::get() {
  std::call_once(once_, [this] {
    const at::Generator& generator = at::detail::getDefaultCPUGenerator();
    auto* const implementation = at::check_generator<at::CPUGeneratorImpl>(generator);
    const std::lock_guard lock(implementation->mutex_);
    seed_ = implementation->random64();
  });
  return seed_;
}

ReplicaRandom::ReplicaRandom(ReplicaSeed& seed, int replica)
    : seed_(seed), replica_(replica), before_(std::exchange(current, this)), include_(kKey) {}

ReplicaRandom::~ReplicaRandom() { current = before_; }

const at::Generator& ReplicaRandom::generator() {
  if (!generator_.defined()) {
    const std::uint64_t seed = seed_.get() + 0x9e3779b97f4a7c15 * static_cast<std::uint64_t>(replica_);
    generator_ = at::make_generator<at::CPUGeneratorImpl>(seed);
  }
  return generator_;
}

}  // namespace ddpkit
