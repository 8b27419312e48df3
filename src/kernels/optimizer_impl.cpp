// Compiled once per variant and vectorized by the compiler. Everything except the kernels is in an unnamed namespace,
// and no code calls inline functions of other headers (see kernels/element.h).
//
// The update is elementwise, in one pass over memory. The order of the operations is that of torch::optim.
#include <cstddef>

#include "kernels/element.h"
#include "kernels/optimizer.h"

namespace ddpkit::kernels {
namespace {

inline float square_root(float value) { return __builtin_sqrtf(value); }
inline double square_root(double value) { return __builtin_sqrt(value); }
inline float absolute(float value) { return __builtin_fabsf(value); }
inline double absolute(double value) { return __builtin_fabs(value); }

/// The type of the optimizer state for parameters of type T.
template <class T, bool kMaster>
struct StateOf {
  using Type = T;
};
template <class T>
struct StateOf<T, true> {
  using Type = float;
};

/// Returns the value to update: the master, or the parameter if other code has written to it.
template <class T>
float master_of(float master, typename Element<T>::Storage parameter) {
  return Element<T>::store(master) == parameter ? master : Element<T>::load(parameter);
}

template <class T, bool kWeightDecay, bool kAmsgrad, bool kMaster>
void adam_typed(const AdamArguments& a) {
  using A = typename Element<T>::Accumulator;
  using S = typename Element<T>::Storage;
  using State = Element<typename StateOf<T, kMaster>::Type>;
  using W = typename State::Storage;
  S* const parameter = static_cast<S*>(a.parameter);
  const S* const gradient = static_cast<const S*>(a.gradient);
  W* const exp_avg = static_cast<W*>(a.exp_avg);
  W* const exp_avg_sq = static_cast<W*>(a.exp_avg_sq);
  W* const max_exp_avg_sq = static_cast<W*>(a.max_exp_avg_sq);
  [[maybe_unused]] float* const master = a.master;
  const AdamConstants& c = a.constants;
  const A beta1 = static_cast<A>(c.beta1), rest1 = static_cast<A>(1 - c.beta1);
  const A beta2 = static_cast<A>(c.beta2), rest2 = static_cast<A>(1 - c.beta2);
  const A decay = static_cast<A>(c.decay), weight_decay = static_cast<A>(c.weight_decay);
  const A eps = static_cast<A>(c.eps), step_size = static_cast<A>(c.step_size);
  const A inverse_root = static_cast<A>(c.inverse_root), factor = static_cast<A>(c.gradient_factor);
  const std::size_t numel = a.numel;
#pragma GCC ivdep
  for (std::size_t i = 0; i < numel; ++i) {
    A value;
    if constexpr (kMaster)
      value = master_of<T>(master[i], parameter[i]);
    else
      value = Element<T>::load(parameter[i]);
    A g = Element<T>::load(gradient[i]) * factor;
    if constexpr (kWeightDecay)
      g = g + weight_decay * value;
    else
      value = value * decay;
    const A m = State::load(exp_avg[i]) * beta1 + rest1 * g;
    const A v = State::load(exp_avg_sq[i]) * beta2 + rest2 * g * g;
    A largest = v;
    if constexpr (kAmsgrad) {
      const A before = State::load(max_exp_avg_sq[i]);
      largest = (v > before || v != v) ? v : before;
      max_exp_avg_sq[i] = State::store(largest);
    }
    value = value - step_size * m / (square_root(largest) * inverse_root + eps);
    exp_avg[i] = State::store(m);
    exp_avg_sq[i] = State::store(v);
    if constexpr (kMaster) master[i] = value;
    parameter[i] = Element<T>::store(value);
  }
}

template <class T, bool kMaster>
void adam_with(const AdamArguments& a) {
  if (a.constants.weight_decay != 0)
    return a.max_exp_avg_sq ? adam_typed<T, true, true, kMaster>(a) : adam_typed<T, true, false, kMaster>(a);
  return a.max_exp_avg_sq ? adam_typed<T, false, true, kMaster>(a) : adam_typed<T, false, false, kMaster>(a);
}

template <class T>
void adam_of(const AdamArguments& a) {
  if constexpr (sizeof(typename Element<T>::Storage) == 2) {
    if (a.master) return adam_with<T, true>(a);
  }
  adam_with<T, false>(a);
}

enum class Momentum { kNone, kFirst, kKept };

template <class T, Momentum kMomentum, bool kNesterov, bool kMaster>
void sgd_typed(const SgdArguments& a) {
  using A = typename Element<T>::Accumulator;
  using S = typename Element<T>::Storage;
  S* const parameter = static_cast<S*>(a.parameter);
  const S* const gradient = static_cast<const S*>(a.gradient);
  using State = Element<typename StateOf<T, kMaster>::Type>;
  auto* const buffer = static_cast<typename State::Storage*>(a.momentum_buffer);
  [[maybe_unused]] float* const master = a.master;
  const SgdConstants& c = a.constants;
  const A lr = static_cast<A>(c.lr), momentum = static_cast<A>(c.momentum), rest = static_cast<A>(1 - c.dampening);
  const A weight_decay = static_cast<A>(c.weight_decay), factor = static_cast<A>(c.gradient_factor);
  const std::size_t numel = a.numel;
#pragma GCC ivdep
  for (std::size_t i = 0; i < numel; ++i) {
    A value;
    if constexpr (kMaster)
      value = master_of<T>(master[i], parameter[i]);
    else
      value = Element<T>::load(parameter[i]);
    A g = Element<T>::load(gradient[i]) * factor;
    g = g + weight_decay * value;
    if constexpr (kMomentum != Momentum::kNone) {
      A kept = g;
      if constexpr (kMomentum == Momentum::kKept) kept = State::load(buffer[i]) * momentum + rest * g;
      buffer[i] = State::store(kept);
      g = kNesterov ? g + momentum * kept : kept;
    }
    value = value - lr * g;
    if constexpr (kMaster) master[i] = value;
    parameter[i] = Element<T>::store(value);
  }
}

template <class T, bool kMaster>
void sgd_with(const SgdArguments& a) {
  const bool nesterov = a.constants.nesterov;
  if (!a.momentum_buffer) return sgd_typed<T, Momentum::kNone, false, kMaster>(a);
  if (a.constants.first)
    return nesterov ? sgd_typed<T, Momentum::kFirst, true, kMaster>(a)
                    : sgd_typed<T, Momentum::kFirst, false, kMaster>(a);
  return nesterov ? sgd_typed<T, Momentum::kKept, true, kMaster>(a) : sgd_typed<T, Momentum::kKept, false, kMaster>(a);
}

template <class T>
void sgd_of(const SgdArguments& a) {
  if constexpr (sizeof(typename Element<T>::Storage) == 2) {
    if (a.master) return sgd_with<T, true>(a);
  }
  sgd_with<T, false>(a);
}

/// Sums have this number of lanes for any vector width, so all variants add in the same order.
constexpr std::size_t kLanes = 32;

template <class T, NormKind kKind>
double norm_typed(const typename Element<T>::Storage* values, std::size_t numel) {
  const auto join = [](double total, double value) {
    if constexpr (kKind == NormKind::kLargest) return (value > total || value != value) ? value : total;
    if constexpr (kKind == NormKind::kSquares) return total + value * value;
    return total + value;
  };
  double lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane)
      lanes[lane] = join(lanes[lane], absolute(static_cast<double>(Element<T>::load(values[i + lane]))));
  }
  for (; i < numel; ++i) lanes[0] = join(lanes[0], absolute(static_cast<double>(Element<T>::load(values[i]))));
  double total = 0;
  for (const double lane : lanes) {
    if constexpr (kKind == NormKind::kLargest)
      total = (lane > total || lane != lane) ? lane : total;
    else
      total += lane;
  }
  return total;
}

template <class T>
void norm_of(NormArguments& a) {
  const auto* values = static_cast<const typename Element<T>::Storage*>(a.values);
  switch (a.kind) {
    case NormKind::kSquares:
      a.result = norm_typed<T, NormKind::kSquares>(values, a.numel);
      return;
    case NormKind::kAbsolutes:
      a.result = norm_typed<T, NormKind::kAbsolutes>(values, a.numel);
      return;
    case NormKind::kLargest:
      a.result = norm_typed<T, NormKind::kLargest>(values, a.numel);
      return;
  }
}

template <class T>
void scale_of(const ScaleArguments& a) {
  using A = typename Element<T>::Accumulator;
  auto* const values = static_cast<typename Element<T>::Storage*>(a.values);
  const A factor = static_cast<A>(a.factor);
  for (std::size_t i = 0; i < a.numel; ++i) values[i] = Element<T>::store(Element<T>::load(values[i]) * factor);
}

}  // namespace

#define DDPKIT_DEFINE_VARIANT(kernel, Arguments)                \
  template <>                                                   \
  bool kernel<Variant::DDPKIT_VARIANT>(Arguments & arguments) { \
    switch (arguments.dtype) {                                  \
      case DataType::kFloat32:                                  \
        return kernel##_of<float>(arguments), true;             \
      case DataType::kFloat64:                                  \
        return kernel##_of<double>(arguments), true;            \
      case DataType::kBFloat16:                                 \
        return kernel##_of<BFloat16>(arguments), true;          \
      case DataType::kFloat16:                                  \
        return kernel##_of<Half>(arguments), true;              \
      default:                                                  \
        return false;                                           \
    }                                                           \
  }
DDPKIT_DEFINE_VARIANT(adam, const AdamArguments)
DDPKIT_DEFINE_VARIANT(sgd, const SgdArguments)
DDPKIT_DEFINE_VARIANT(norm, NormArguments)
DDPKIT_DEFINE_VARIANT(scale, const ScaleArguments)

}  // namespace ddpkit::kernels
