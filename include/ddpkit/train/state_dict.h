// Tier 1: ATen/core/Tensor.h. Torch's module is declared, not included.
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
/// or a tuple of keys. Two are equal if type and value are.
class OtherStateKey {
 public:
  /// Throws InvalidArgument for a value that cannot be a key.
  explicit OtherStateKey(const StateValue& value);
  const StateValue& value() const noexcept { return *value_; }
  const std::string& pickle() const noexcept { return pickle_; }  ///< Its value's, which identifies it.
  bool operator==(const OtherStateKey& other) const noexcept { return pickle_ == other.pickle_; }

 private:
  std::shared_ptr<const StateValue> value_;
  std::string pickle_;
};

}  // namespace ddpkit::train

template <>
struct std::hash<ddpkit::train::OtherStateKey> {
  std::size_t operator()(const ddpkit::train::OtherStateKey& key) const noexcept {
    return std::hash<std::string>()(key.pickle());
  }
};

namespace ddpkit::train {

using StateKey = std::variant<std::int64_t, std::string, OtherStateKey>;  ///< Of a Python dict.
std::string describe(const StateKey& key);                                ///< For messages.
using StateList = std::vector<StateValue>;

/// A Python tuple, where StateList is a list.
struct StateTuple {
  std::vector<StateValue> items;  ///< In order.
};

/// A Python set.
struct StateSet {
  std::vector<StateValue> items;  ///< In any order.
};

/// A Python bytes, or a bytearray.
struct StateBytes {
  std::string bytes;
  bool is_bytearray = false;
};

/// A Python int that std::int64_t cannot hold.
struct StateBigInt {
  std::string bytes;  ///< Two's complement, the lowest byte first, as short as possible.
};

/// A Python dict, OrderedDict or Counter in its order.
class StateDict {
 public:
  enum class Kind { kDict, kOrderedDict, kCounter };  ///< What Python sees.

  StateDict();
  StateDict(std::initializer_list<StateItem> items);
  StateDict(const StateDict& other);
  StateDict(StateDict&& other) noexcept;
  StateDict& operator=(const StateDict& other);
  StateDict& operator=(StateDict&& other) noexcept;
  ~StateDict();

  /// The key's value; a key that is not there is added at the end, with None.
  StateValue& operator[](const StateKey& key);
  /// Null where the key is not there.
  const StateValue* find(const StateKey& key) const;
  /// Throws InvalidArgument, naming the key, where it is not there.
  const StateValue& at(const StateKey& key) const;
  /// Whether the key is there.
  bool contains(const StateKey& key) const { return find(key) != nullptr; }
  std::size_t size() const noexcept;
  bool empty() const noexcept { return size() == 0; }
  Kind kind() const noexcept { return kind_; }
  void set_kind(Kind kind) noexcept { kind_ = kind; }
  std::vector<StateItem>::const_iterator begin() const noexcept;
  std::vector<StateItem>::const_iterator end() const noexcept;

 private:
  std::vector<StateItem> items_;  // Not yet a complete type: what needs one is defined behind it.
  std::unordered_map<StateKey, std::size_t> index_;
  Kind kind_ = Kind::kDict;
};

/// What a state dict is made of: None, bool, int, float, str, tensor, list, tuple, dict, and the rarer types that
/// torch.load(weights_only=True) admits. Tensors are handles, as everywhere in LibTorch: a copy of a StateValue shares
/// their memory.
class StateValue {
 public:
  using Variant = std::variant<std::monostate, bool, std::int64_t, double, std::string, at::Tensor, StateList,
                               StateTuple, StateDict, StateSet, StateBytes, StateBigInt, std::complex<double>,
                               at::ScalarType, c10::Device, c10::Layout>;

  StateValue() = default;
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

  const Variant& variant() const noexcept { return value_; }
  bool is_none() const noexcept { return std::holds_alternative<std::monostate>(value_); }
  /// Null where it is something else. T is one of Variant's.
  template <class T>
  const T* get_if() const noexcept {
    return std::get_if<T>(&value_);
  }
  /// Each throws InvalidArgument, saying what it is, where it is something else.
  bool to_bool() const;
  std::int64_t to_int() const;
  double to_double() const;  ///< Of a float or an int.
  const std::string& to_string() const;
  const at::Tensor& to_tensor() const;
  const StateDict& to_dict() const;
  /// The items of a list or a tuple.
  const std::vector<StateValue>& to_items() const;

 private:
  Variant value_;
};

/// An entry of a StateDict.
struct StateItem {
  StateKey key;
  StateValue value;
};

inline std::size_t StateDict::size() const noexcept { return items_.size(); }
inline std::vector<StateItem>::const_iterator StateDict::begin() const noexcept { return items_.begin(); }
inline std::vector<StateItem>::const_iterator StateDict::end() const noexcept { return items_.end(); }

/// Writes what Python's torch.load(weights_only=True) reads, whole or not at all. Tensors on a storage that they share
/// go on sharing it, with their strides; storages are written whole, as torch.save writes them, from any device, and
/// are read to the CPU. Throws InvalidArgument for a quantized tensor and for values nested deeper than 100, Error with
/// the system's reason when the file cannot be written. Not collective: one rank writes a file.
void save_state_dict(const std::filesystem::path& path, const StateValue& value);

/// Reads what save_state_dict() or Python's torch.save (2.11) wrote, to the CPU: the types of docs/state-dicts.md. Runs
/// nothing: a file is data here, whoever made it. Throws InvalidArgument, in one sentence with the file's name, when it
/// is missing, truncated, damaged (its checksums differ), not little-endian, nested deeper than 100, or holds anything
/// else, which is named.
StateValue load_state_dict(const std::filesystem::path& path);

/// Parameters and buffers by name, in the order and under the names of Python's state_dict(); detached, on the module's
/// own memory. Of a module in DistributedDataParallel give the bare module.
StateDict module_state(const torch::nn::Module& module);

/// Options of load_module_state().
struct LoadModuleOptions {
  /// Every name of the module must be in the state, and the other way round.
  bool strict = true;
};

/// Names that did not meet; both empty where `strict`.
struct IncompatibleKeys {
  std::vector<std::string> missing;     ///< In the module only.
  std::vector<std::string> unexpected;  ///< In the state only.
};

/// Copies the state's tensors into the module's parameters and buffers, which keep their storage, type and device, as
/// Python's load_state_dict() does. Throws InvalidArgument, with the module as it was, that names what is missing, what
/// is unexpected (where `strict`), and what has another shape (always).
IncompatibleKeys load_module_state(torch::nn::Module& module, const StateDict& state,
                                   const LoadModuleOptions& options = {});

}  // namespace ddpkit::train
