// Tier 1: ATen/core/Tensor.h. Nested values of tensors: finding the tensors in outputs, and the same value with other
// tensors in it.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <functional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace ddpkit {

/// What map_tensors() puts in a tensor's place.
using TensorMap = std::function<at::Tensor(const at::Tensor&)>;

namespace detail {

template <class T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};

template <class T>
concept OptionalLike = requires(const T& value) {
  value.has_value();
  *value;
};

template <class T>
concept RangeLike = requires(const T& value) {
  value.begin();
  value.end();
};

template <class T>
concept HasOutputTensors = requires(const T& value) {
  { output_tensors(value) } -> std::convertible_to<std::vector<at::Tensor>>;
};

template <class T>
concept HasMapTensors = requires(const T& value, const TensorMap& map) {
  { map_tensors(value, map) } -> std::same_as<T>;
};

/// torch::data::Example and its like.
template <class T>
concept ExampleLike = requires(const T& value) {
  T(value.data, value.target);
};

/// torch::OrderedDict.
template <class T>
concept OrderedDictLike = RangeLike<T> && requires(T& value) {
  value.begin()->key();
  value.insert(value.begin()->key(), value.begin()->value());
};

template <class T>
concept Growable = RangeLike<T> && requires(T& value) {
  value.insert(value.end(), *value.begin());
};

/// Not called map_tensors, so that a value's own function of that name is found beside its type alone.
template <class T>
T rebuilt(const T& value, const TensorMap& map) {
  if constexpr (std::is_convertible_v<const T&, const at::Tensor&>) {
    return static_cast<T>(map(value));
  } else if constexpr (HasMapTensors<T>) {
    return map_tensors(value, map);
  } else if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_convertible_v<const T&, std::string>) {
    return value;
  } else if constexpr (ExampleLike<T>) {
    auto data = rebuilt(value.data, map);
    return T(std::move(data), rebuilt(value.target, map));
  } else if constexpr (TupleLike<T>) {
    // Braces: from left to right.
    return std::apply([&](const auto&... parts) { return T{rebuilt(parts, map)...}; }, value);
  } else if constexpr (OptionalLike<T>) {
    return value.has_value() ? T(rebuilt(*value, map)) : value;
  } else if constexpr (OrderedDictLike<T>) {
    T result;
    for (const auto& item : value) result.insert(item.key(), rebuilt(item.value(), map));
    return result;
  } else if constexpr (Growable<T>) {
    T result;
    for (const auto& part : value) result.insert(result.end(), rebuilt(std::decay_t<decltype(part)>(part), map));
    return result;
  } else {
    return value;
  }
}

}  // namespace detail

/// Appends the tensors in `outputs`: a tensor, or any nesting of tuples, pairs, arrays, optionals, vectors and maps of
/// tensors. Numbers, strings and the like hold none. False when `outputs` has a type whose tensors cannot be found.
///
/// To make a type of your own known, put a function beside it, in its namespace:
///
///     struct Detection { at::Tensor boxes, scores; };
///     std::vector<at::Tensor> output_tensors(const Detection& d) { return {d.boxes, d.scores}; }
template <class T>
bool collect_tensors(const T& outputs, std::vector<at::Tensor>& tensors) {
  if constexpr (std::is_convertible_v<const T&, const at::Tensor&>) {
    tensors.push_back(outputs);
    return true;
  } else if constexpr (detail::HasOutputTensors<T>) {
    for (const at::Tensor& tensor : output_tensors(outputs)) tensors.push_back(tensor);
    return true;
  } else if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_convertible_v<const T&, std::string>) {
    return true;
  } else if constexpr (detail::TupleLike<T>) {
    return std::apply([&](const auto&... parts) { return (collect_tensors(parts, tensors) & ... & true); }, outputs);
  } else if constexpr (detail::OptionalLike<T>) {
    return !outputs.has_value() || collect_tensors(*outputs, tensors);
  } else if constexpr (detail::RangeLike<T>) {
    bool known = true;
    for (const auto& part : outputs) known = collect_tensors(part, tensors) && known;
    return known;
  } else {
    return false;
  }
}

/// A copy of `value` in which every tensor is replaced by what `map` makes of it, in a fixed order. Looks into any
/// nesting of tuples, pairs, arrays, optionals, vectors, maps, torch::OrderedDict and torch::data::Example. Anything
/// else (numbers, strings, types of your own) is copied as it is.
///
/// To make a type of your own known, put a function beside it, in its namespace:
///
///     struct Detection { at::Tensor boxes, scores; };
///     Detection map_tensors(const Detection& d, const ddpkit::TensorMap& map) { return {map(d.boxes), map(d.scores)};
///     }
template <class T>
T with_tensors(const T& value, const TensorMap& map) {
  return detail::rebuilt(value, map);
}

/// The tensors in `value`, in the order in which with_tensors() comes to them. Undefined ones are among them.
template <class T>
std::vector<at::Tensor> tensors_in(const T& value) {
  std::vector<at::Tensor> tensors;
  with_tensors(value, [&](const at::Tensor& tensor) {
    tensors.push_back(tensor);
    return tensor;
  });
  return tensors;
}

/// `value` with `tensors` in the place of its own. `tensors` holds as many as tensors_in(value).
template <class T>
T with_tensors(const T& value, const std::vector<at::Tensor>& tensors) {
  std::size_t next = 0;
  return with_tensors(value, [&](const at::Tensor&) { return tensors.at(next++); });
}

}  // namespace ddpkit
