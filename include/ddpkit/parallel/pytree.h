// Tier 1: ATen/core/Tensor.h. Finds and replaces the tensors in nested values.
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

/// Returns the replacement of a tensor.
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

/// Types like torch::data::Example.
template <class T>
concept ExampleLike = requires(const T& value) {
  T(value.data, value.target);
};

/// Types like torch::OrderedDict.
template <class T>
concept OrderedDictLike = RangeLike<T> && requires(T& value) {
  value.begin()->key();
  value.insert(value.begin()->key(), value.begin()->value());
};

template <class T>
concept Growable = RangeLike<T> && requires(T& value) {
  value.insert(value.end(), *value.begin());
};

/// Types in which tree_map() looks for tensors.
template <class T>
concept TreeLike = std::is_convertible_v<const T&, const at::Tensor&> || HasMapTensors<T> || ExampleLike<T> ||
    TupleLike<T> || OptionalLike<T> || RangeLike<T>;

}  // namespace detail

/// Appends the tensors in `outputs` to `tensors`. `outputs` is a tensor, or any nesting of tuples, pairs, arrays,
/// optionals, vectors and maps of tensors. Numbers and strings contain no tensors. Returns false if the type of
/// `outputs` is unknown.
///
/// To support another type, define a function in its namespace:
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

/// Returns a copy of `value` in which every tensor is replaced by the result of `map`, in a fixed order. Supports any
/// nesting of tuples, pairs, arrays, optionals, vectors, maps, torch::OrderedDict and torch::data::Example. Other
/// values (numbers, strings, other types) are copied.
///
/// To support another type, define a function in its namespace:
///
///     struct Detection { at::Tensor boxes, scores; };
///     Detection map_tensors(const Detection& d, const ddpkit::TensorMap& map) { return {map(d.boxes), map(d.scores)};
///     }
template <class T>
T tree_map(const T& value, const TensorMap& map) {
  if constexpr (std::is_convertible_v<const T&, const at::Tensor&>) {
    return static_cast<T>(map(value));
  } else if constexpr (detail::HasMapTensors<T>) {
    return map_tensors(value, map);
  } else if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_convertible_v<const T&, std::string>) {
    return value;
  } else if constexpr (detail::ExampleLike<T>) {
    auto data = tree_map(value.data, map);
    return T(std::move(data), tree_map(value.target, map));
  } else if constexpr (detail::TupleLike<T>) {
    // Braces evaluate from left to right.
    return std::apply([&](const auto&... parts) { return T{tree_map(parts, map)...}; }, value);
  } else if constexpr (detail::OptionalLike<T>) {
    return value.has_value() ? T(tree_map(*value, map)) : value;
  } else if constexpr (detail::OrderedDictLike<T>) {
    T result;
    for (const auto& item : value) result.insert(item.key(), tree_map(item.value(), map));
    return result;
  } else if constexpr (detail::Growable<T>) {
    T result;
    for (const auto& part : value) result.insert(result.end(), tree_map(std::decay_t<decltype(part)>(part), map));
    return result;
  } else {
    return value;
  }
}

/// Returns the tensors in `value`, in the order of tree_map(), including undefined ones.
template <class T>
std::vector<at::Tensor> tree_leaves(const T& value) {
  std::vector<at::Tensor> tensors;
  tree_map(value, [&](const at::Tensor& tensor) {
    tensors.push_back(tensor);
    return tensor;
  });
  return tensors;
}

/// Returns a copy of `value` with its tensors replaced by `tensors`, which has as many as tree_leaves(value).
template <class T>
T tree_unflatten(const T& value, const std::vector<at::Tensor>& tensors) {
  std::size_t next = 0;
  return tree_map(value, [&](const at::Tensor&) { return tensors.at(next++); });
}

}  // namespace ddpkit
