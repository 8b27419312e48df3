// Tier 1. State dicts in Python's pickle format, protocol 2.
#pragma once

#include <ATen/core/Tensor.h>

#include <complex>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ddpkit/train/state_dict.h>

namespace ddpkit::train {

/// Maximum nesting depth of values, for writing and reading.
constexpr int kDeepest = 100;

/// Writes pickles that torch.load(weights_only=True) accepts: the only globals are those of tensors. Throws
/// InvalidArgument.
class Pickler {
 public:
  explicit Pickler(const StateValue& value);

  const std::string& pickle() const noexcept { return pickle_; }
  /// Returns the bytes of record data/NUMBER, on the CPU. [number]
  const std::vector<at::Tensor>& storages() const noexcept { return storages_; }

 private:
  void write(const StateValue& value, int depth);
  void write(const StateDict& dict, int depth);
  void write(const at::Tensor& tensor);
  void write_dense(const at::Tensor& tensor);
  void write_sparse(const at::Tensor& tensor);
  void write_meta(const at::Tensor& tensor);
  void write(const StateBytes& bytes);
  void write(const StateBigInt& value);
  void write(const std::complex<double>& value);
  void write(at::ScalarType dtype);
  void write(const c10::Device& device);
  void write(c10::Layout layout);
  void write(bool value);
  void write(double value);
  void write(std::int64_t value);
  void write(std::string_view text);
  void write(const std::string& text) { write(std::string_view(text)); }  ///< It converts to c10::Device too.
  void write_shape(at::IntArrayRef numbers);
  void write_hooks();
  void global(std::string_view module, std::string_view name);
  /// Calls the global before the mark with all following values as arguments.
  void call();
  std::size_t storage_number(const at::Tensor& tensor);

  std::string pickle_;
  std::vector<at::Tensor> storages_;
  /// Tensors of several types on one storage get one record per type.
  std::map<std::pair<const void*, at::ScalarType>, std::size_t> numbers_;
  std::vector<at::Tensor> held_;  ///< Temporaries whose storages are keys of `numbers_`.
};

/// Reads `pickle` without executing code. `storage` returns the bytes of record data/KEY. Throws BadFile.
StateValue unpickle(std::string_view pickle, const std::function<c10::Storage(const std::string& key)>& storage);

}  // namespace ddpkit::train
