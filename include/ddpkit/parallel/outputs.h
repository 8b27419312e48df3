// Tier 1: ATen/core/Tensor.h. Finding the tensors in what a module's forward returns.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace ddpkit {

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

}  // namespace ddpkit
