// Tier 1: ATen/core/Tensor.h. Torch's module is only declared.
#pragma once

#include <ATen/core/Tensor.h>

#include <complex>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace torch::nn {
class Module;
}

namespace ddpkit::train {

class StateValue;
struct StateItem;

/// A key of a Python dict that is neither int nor str: None, a bool, float, larger int, complex, bytes, dtype, device,
/// or a tuple of keys. Two keys are equal if their types and values are equal.
class OtherStateKey {
 public:
  /// Throws InvalidArgument for a value that cannot be a key.
  explicit OtherStateKey(const StateValue& value);
  const StateValue& value() const noexcept { return *value_; }    ///< The key as a value.
  const std::string& pickle() const noexcept { return pickle_; }  ///< Pickle of the value. Identifies the key.
  /// Compares types and values.
  bool operator==(const OtherStateKey& other) const noexcept { return pickle_ == other.pickle_; }

 private:
  std::shared_ptr<const StateValue> value_;
  std::string pickle_;
};

}  // namespace ddpkit::train

/// Hash for std::unordered_map.
template <>
struct std::hash<ddpkit::train::OtherStateKey> {
  /// Equal keys have the same hash.
  std::size_t operator()(const ddpkit::train::OtherStateKey& key) const noexcept {
    return std::hash<std::string>()(key.pickle());
  }
};

namespace ddpkit::train {

using StateKey = std::variant<std::int64_t, std::string, OtherStateKey>;  ///< Key of a Python dict.
std::string describe(const StateKey& key);                                ///< Returns the key as text for messages.
using StateList = std::vector<StateValue>;                                ///< A Python list.

/// A Python tuple.
struct StateTuple {
  std::vector<StateValue> items;  ///< In order.
};

/// A Python set.
struct StateSet {
  std::vector<StateValue> items;  ///< In any order.
};

/// A Python bytes or bytearray.
struct StateBytes {
  std::string bytes;          ///< The content.
  bool is_bytearray = false;  ///< False: bytes.
};

/// A Python int that std::int64_t cannot hold.
struct StateBigInt {
  std::string bytes;  ///< Two's complement, little-endian, minimal length.
};

/// A Python dict, OrderedDict or Counter. Keeps the order.
class StateDict {
 public:
  /// Type in Python.
  enum class Kind {
    kDict,         ///< dict.
    kOrderedDict,  ///< collections.OrderedDict.
    kCounter,      ///< collections.Counter.
  };

  StateDict();
  /// Adds the items in order. Of items with the same key, the last is kept.
  StateDict(std::initializer_list<StateItem> items);
  StateDict(const StateDict& other);
  StateDict(StateDict&& other) noexcept;
  StateDict& operator=(const StateDict& other);
  StateDict& operator=(StateDict&& other) noexcept;
  ~StateDict();

  /// Returns the key's value. Adds a missing key at the end, with None.
  StateValue& operator[](const StateKey& key);
  /// Returns null if the key does not exist.
  const StateValue* find(const StateKey& key) const;
  /// Throws InvalidArgument, which names the key, if the key does not exist.
  const StateValue& at(const StateKey& key) const;
  /// Returns whether the key exists.
  bool contains(const StateKey& key) const { return find(key) != nullptr; }
  std::size_t size() const noexcept;                              ///< Number of entries.
  bool empty() const noexcept { return size() == 0; }             ///< True without entries.
  Kind kind() const noexcept { return kind_; }                    ///< Type in Python. Initially a dict.
  void set_kind(Kind kind) noexcept { kind_ = kind; }             ///< Sets the type in Python.
  std::vector<StateItem>::const_iterator begin() const noexcept;  ///< First entry, in order of insertion.
  std::vector<StateItem>::const_iterator end() const noexcept;    ///< Behind the last entry.

 private:
  std::vector<StateItem> items_;  // Incomplete type here: functions that need it are defined below.
  std::unordered_map<StateKey, std::size_t> index_;
  Kind kind_ = Kind::kDict;
};

/// A value in a state dict: None, bool, int, float, str, tensor, list, tuple, dict, and the less common types that
/// torch.load(weights_only=True) accepts. A copy of a StateValue shares the memory of its tensors.
class StateValue {
 public:
  /// std::monostate is None.
  using Variant = std::variant<std::monostate, bool, std::int64_t, double, std::string, at::Tensor, StateList,
                               StateTuple, StateDict, StateSet, StateBytes, StateBigInt, std::complex<double>,
                               at::ScalarType, c10::Device, c10::Layout>;

  StateValue() = default;
  /// Converts from any of Variant's types, and from any integer.
  /// @{
  StateValue(bool value) : value_(value) {}
  template <std::integral Integer>
  StateValue(Integer value) : value_(static_cast<std::int64_t>(value)) {}
  StateValue(double value) : value_(value) {}
  StateValue(std::string value) : value_(std::move(value)) {}
  StateValue(const char* value) : value_(std::string(value)) {}
  StateValue(at::Tensor value) : value_(std::move(value)) {}
  StateValue(StateList value) : value_(std::move(value)) {}
  StateValue(StateTuple value) : value_(std::move(value)) {}
  StateValue(StateDict value) : value_(std::move(value)) {}
  StateValue(StateSet value) : value_(std::move(value)) {}
  StateValue(StateBytes value) : value_(std::move(value)) {}
  StateValue(StateBigInt value) : value_(std::move(value)) {}
  StateValue(std::complex<double> value) : value_(value) {}
  StateValue(at::ScalarType value) : value_(value) {}
  StateValue(c10::Device value) : value_(value) {}
  StateValue(c10::Layout value) : value_(value) {}
  /// @}

  const Variant& variant() const noexcept { return value_; }  ///< For std::visit().
  /// Returns true for Python's None.
  bool is_none() const noexcept { return std::holds_alternative<std::monostate>(value_); }
  /// Returns null for another type. T is one of Variant's types.
  template <class T>
  const T* get_if() const noexcept {
    return std::get_if<T>(&value_);
  }
  /// Returns the value. to_double() also accepts an int; to_items() accepts a list or a tuple. Throws InvalidArgument
  /// for another type. The error names the actual type.
  /// @{
  bool to_bool() const;
  std::int64_t to_int() const;
  double to_double() const;
  const std::string& to_string() const;
  const at::Tensor& to_tensor() const;
  const StateDict& to_dict() const;
  const std::vector<StateValue>& to_items() const;
  /// @}

 private:
  Variant value_;
};

/// An entry of a StateDict.
struct StateItem {
  StateKey key;      ///< Unique in its StateDict.
  StateValue value;  ///< Any value.
};

inline std::size_t StateDict::size() const noexcept { return items_.size(); }
inline std::vector<StateItem>::const_iterator StateDict::begin() const noexcept { return items_.begin(); }
inline std::vector<StateItem>::const_iterator StateDict::end() const noexcept { return items_.end(); }

/// Writes a file that Python's torch.load(weights_only=True) can read, atomically. Tensors that share a storage share
/// it in the file, with their strides. Whole storages are written, as in torch.save, from any device; they are read to
/// the CPU. Throws InvalidArgument for a quantized tensor and for values nested deeper than 100. Throws Error with the
/// system's reason if the file cannot be written. Not collective: one rank writes a file.
void save_state_dict(const std::filesystem::path& path, const StateValue& value);

/// Reads a file of save_state_dict() or of Python's torch.save (2.11) to the CPU, with the types of
/// docs/state-dicts.md. Safe for untrusted files: runs no code from the file. Throws InvalidArgument, in one sentence
/// with the file's name, if the file is missing, truncated, damaged (wrong checksum), not little-endian, nested deeper
/// than 100, or has an unsupported type, which the error names.
StateValue load_state_dict(const std::filesystem::path& path);

/// Returns parameters and buffers by name, with the order and names of Python's state_dict(). Tensors are detached and
/// share the module's memory. For a module in DistributedDataParallel, pass ddp.module().
StateDict module_state(const torch::nn::Module& module);

/// Options of load_module_state().
struct LoadModuleOptions {
  /// The module and the state must have the same names.
  bool strict = true;
};

/// Names that only the module or only the state has. Both are empty if `strict`.
struct IncompatibleKeys {
  std::vector<std::string> missing;     ///< In the module only.
  std::vector<std::string> unexpected;  ///< In the state only.
};

/// Copies the state's tensors into the module's parameters and buffers, which keep their storage, type and device, like
/// Python's load_state_dict(). Throws InvalidArgument, and changes nothing, for missing and unexpected names (if
/// `strict`) and for tensors with another shape (always). The error lists their names.
IncompatibleKeys load_module_state(torch::nn::Module& module, const StateDict& state,
                                   const LoadModuleOptions& options = {});

}  // namespace ddpkit::train
