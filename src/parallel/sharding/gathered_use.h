// Tier 1. Parameters whose memory exists only while operations use them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>
#include <vector>

namespace ddpkit {

/// Owns the memory of parameters. Operations call it on any thread.
class GatheredMemory {
 public:
  virtual ~GatheredMemory() = default;
  /// Called before an operation on one of the parameters, or on a view of one. From then on the memory must exist,
  /// until release(). `writes`: the operation writes to it. If acquire() throws, the operation does not run.
  virtual void acquire(const char* operation, bool writes) = 0;
  virtual void release() noexcept = 0;
};

/// A parameter with memory that is attached and detached. The tensor object, its shape and strides stay, and all views
/// share the memory, so autograd's saved tensors find it again.
///
/// The parameter has a dispatch key above those of autocast and autograd. A boxed fallback of this key sees every
/// operation: in forward, in backward, and on views, which copy the key. A call that bypasses the dispatcher
/// (data_ptr(), torch::save()) throws while the memory is detached.
class GatheredParameter {
 public:
  /// Detaches the parameter from its memory, whose values the caller has copied. The parameter is dense. From now on
  /// its type is `dtype`. `original_dtype`: the type of the caller's copy. `kept`: lives as long as the detached
  /// memory, also without this object.
  GatheredParameter(std::string name, at::Tensor parameter, at::ScalarType dtype, at::ScalarType original_dtype,
                    std::weak_ptr<GatheredMemory> memory, std::shared_ptr<GatheredMemory> kept = nullptr);

  /// `data`: the elements in the parameter's memory order. The caller keeps them until detach().
  void attach(void* data);
  void detach();
  /// Returns whether set_data(), torch::load() or Module::to() has given the parameter other memory.
  bool is_replaced() const noexcept;
  /// Returns the values of the other memory in the parameter's memory order, one-dimensional. Their type is that of the
  /// parameter, or the one before. Throws InvalidArgument if the shape has changed, or for another type.
  at::Tensor replacing_values() const;
  /// Moves the parameter back to its own memory, attached or detached as before.
  void restore();

  const std::string& name() const noexcept { return name_; }
  const at::Tensor& tensor() const noexcept { return parameter_; }

  /// Returns whether the tensor's memory is that of a GatheredParameter, also after the parameter's owner has ended.
  static bool is_gathered(const at::Tensor& tensor);
  /// Returns the `kept` of the tensor's memory; null if there is none.
  static std::shared_ptr<GatheredMemory> kept_by(const at::Tensor& tensor);

 private:
  void set_memory(void* data, std::size_t bytes);
  void show(const at::Tensor& state);

  std::string name_;
  at::Tensor parameter_;
  at::ScalarType original_dtype_;
  std::vector<std::int64_t> sizes_, strides_;
  std::weak_ptr<GatheredMemory> memory_;
  std::shared_ptr<GatheredMemory> kept_;
  c10::intrusive_ptr<c10::StorageImpl> storage_;
  at::Tensor attached_, detached_;  ///< The parameter's TensorImpl is a shallow copy of one of them.
  bool is_attached_ = false;
};

/// While this object exists, operations of this thread on sharded parameters throw InvalidArgument with `reason`.
class NoGathers {
 public:
  explicit NoGathers(const char* reason) noexcept;
  ~NoGathers();
  NoGathers(const NoGathers&) = delete;
  NoGathers& operator=(const NoGathers&) = delete;

 private:
  const char* before_;
};

}  // namespace ddpkit
