#include "parallel/sharding/gathered_use.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

namespace ddpkit {
namespace {

/// LibTorch reserves this key for extensions that create tensors later. C++ programs do not use it.
constexpr c10::DispatchKey kUseKey = c10::DispatchKey::DeferredInit;
static_assert(kUseKey > c10::DispatchKey::AutocastCUDA && kUseKey > c10::DispatchKey::AutogradFunctionality,
              "an operation must reach this key before autocast and autograd");

/// TensorImpl has no public setter for its keys. A derived class may name the protected member.
struct KeysOf : c10::TensorImpl {
  static c10::DispatchKeySet& of(c10::TensorImpl& tensor) { return tensor.*(&KeysOf::key_set_); }
};

struct Owner {
  std::weak_ptr<GatheredMemory> memory;
  std::shared_ptr<GatheredMemory> kept;
};

void delete_owner(void* owner) { delete static_cast<Owner*>(owner); }

/// Returns the owner of the tensor's memory. Null for memory of other kinds.
const Owner* owner_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const at::DataPtr& data = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->data_ptr();
  return data.get_deleter() == &delete_owner ? static_cast<const Owner*>(data.get_context()) : nullptr;
}

template <class Action>
void for_each_tensor(const c10::IValue& value, const Action& action) {
  if (value.isTensor()) {
    action(value.toTensor());
  } else if (value.isTensorList() || value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor()) action(element.toTensor());
    }
  }
}

/// set_data() calls this operation. It compares keys only. All other operations are uses, also those that make a view:
/// as_strided() reads the size of the memory.
bool reads_no_memory(const c10::FunctionSchema& schema) {
  static std::atomic<const c10::FunctionSchema*> known{nullptr};
  if (&schema == known.load(std::memory_order_relaxed)) return true;
  if (schema.name() != "aten::_has_compatible_shallow_copy_type") return false;
  known = &schema;
  return true;
}

thread_local const char* no_gathers = nullptr;  ///< The reason of NoGathers.

/// The memory that one operation uses.
class Uses {
 public:
  Uses() = default;
  Uses(const Uses&) = delete;
  Uses& operator=(const Uses&) = delete;
  ~Uses() {
    for (const auto& use : uses_) {
      if (use.acquired) use.memory->release();
    }
  }

  void add(const Owner& owner, bool writes) {
    auto memory = owner.memory.lock();
    if (!memory)
      throw InvalidArgument(
          "a parameter was used whose FullyShardedDataParallel has been destroyed, and with it the weights: copy or "
          "save "
          "them before, within whole()");
    const auto found = std::find_if(uses_.begin(), uses_.end(), [&](const Use& use) { return use.memory == memory; });
    if (found == uses_.end()) {
      uses_.push_back({.memory = std::move(memory), .writes = writes});
    } else {
      found->writes = found->writes || writes;
    }
  }

  void acquire(const char* operation) {
    if (no_gathers && !uses_.empty()) throw InvalidArgument(no_gathers);
    for (Use& use : uses_) {
      use.memory->acquire(operation, use.writes);
      use.acquired = true;
    }
  }

 private:
  struct Use {
    std::shared_ptr<GatheredMemory> memory;
    bool writes = false;
    bool acquired = false;
  };
  c10::SmallVector<Use, 2> uses_;
};

void run_operation(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  // The key is removed from this call only. Operations that a composite operation calls come here too.
  const auto next = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kUseKey);
  const c10::FunctionSchema& schema = operation.schema();
  if (reads_no_memory(schema)) return operation.redispatchBoxed(next, stack);
  const auto& arguments = schema.arguments();
  const std::size_t first = stack->size() - arguments.size();
  Uses uses;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    for_each_tensor((*stack)[first + i], [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.key_set().has(kUseKey)) return;
      if (const Owner* owner = owner_of(tensor))
        uses.add(*owner, arguments[i].alias_info() && arguments[i].alias_info()->isWrite());
    });
  }
  uses.acquire(schema.name().c_str());
  operation.redispatchBoxed(next, stack);
  // set_() gives an ordinary tensor the memory of a parameter.
  for (std::size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    for_each_tensor((*stack)[i], [](const at::Tensor& tensor) {
      if (!owner_of(tensor)) return;
      auto& all = KeysOf::of(*tensor.unsafeGetTensorImpl());
      all = all.add(kUseKey);
    });
  }
}

/// Registered when the first parameter is sharded: other programs do not have the fallback, and a linker cannot drop it
/// from a static library.
void register_fallback() {
  static auto* library = [] {
    auto* made = new torch::Library(torch::Library::IMPL, "_", kUseKey, __FILE__, __LINE__);
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&run_operation>());
    return made;  // Parameters may outlive static objects.
  }();
  static_cast<void>(library);
}

}  // namespace

GatheredParameter::GatheredParameter(std::string name, at::Tensor parameter, at::ScalarType dtype,
                                     at::ScalarType original_dtype, std::weak_ptr<GatheredMemory> memory,
                                     std::shared_ptr<GatheredMemory> kept)
    : name_(std::move(name)),
      parameter_(std::move(parameter)),
      original_dtype_(original_dtype),
      sizes_(parameter_.sizes().vec()),
      strides_(parameter_.strides().vec()),
      memory_(std::move(memory)),
      kept_(std::move(kept)) {
  register_fallback();
  storage_ = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), c10::SymInt(0),
                                                   at::DataPtr(nullptr, parameter_.device()), /*allocator=*/nullptr,
                                                   /*resizable=*/false);
  set_memory(nullptr, 0);
  for (at::Tensor* state : {&attached_, &detached_}) {
    *state = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage_), parameter_.key_set().add(kUseKey),
                                                      c10::scalarTypeToTypeMeta(dtype));
    state->unsafeGetTensorImpl()->set_sizes_and_strides(sizes_, strides_);
  }
  // torch::save() bypasses the dispatcher. Without this, it would write no elements.
  detached_.unsafeGetTensorImpl()->set_storage_access_should_throw();
  if (dtype != original_dtype_) parameter_.mutable_grad().reset();
  parameter_.set_data(attached_);
  show(detached_);
}

void GatheredParameter::set_memory(void* data, std::size_t bytes) {
  storage_->set_data_ptr_noswap(at::DataPtr(data, new Owner{memory_, kept_}, &delete_owner, parameter_.device()));
  storage_->set_nbytes(bytes);
}

void GatheredParameter::show(const at::Tensor& state) {
  parameter_.unsafeGetTensorImpl()->shallow_copy_from(state.getIntrusivePtr());
}

void GatheredParameter::attach(void* data) {
  set_memory(data, static_cast<std::size_t>(attached_.numel()) * attached_.element_size());
  is_attached_ = true;
  show(attached_);
}

void GatheredParameter::detach() {
  is_attached_ = false;
  show(detached_);
  set_memory(nullptr, 0);
}

bool GatheredParameter::is_replaced() const noexcept {
  return parameter_.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() != storage_.get();
}

at::Tensor GatheredParameter::replacing_values() const {
  const bool same_type = parameter_.dtype() == attached_.dtype() || parameter_.scalar_type() == original_dtype_;
  if (parameter_.sizes() != at::IntArrayRef(sizes_) || !same_type || parameter_.device() != attached_.device() ||
      parameter_.layout() != at::kStrided)
    throw InvalidArgument(fmt::format(
        "parameter {} is now [{}] {} on {}, but was [{}] {} on {} when it was sharded: convert, move or "
        "resize a model before FullyShardedDataParallel",
        name_, fmt::join(parameter_.sizes(), ", "), c10::toString(parameter_.scalar_type()), parameter_.device().str(),
        fmt::join(sizes_, ", "), c10::toString(attached_.scalar_type()), attached_.device().str()));
  at::Tensor other = parameter_.detach();
  // torch::load() calls set_(), which gives the parameter memory of the file's type, and keeps the parameter's type.
  const std::size_t original_bytes = static_cast<std::size_t>(other.numel()) * c10::elementSize(original_dtype_);
  if (other.nbytes() != original_bytes && other.storage().nbytes() == original_bytes)
    other = at::empty({0}, other.options().dtype(original_dtype_))
                .set_(other.storage(), other.storage_offset(), other.sizes(), other.strides());
  const at::Tensor values = at::empty_strided(sizes_, strides_, other.options());
  values.copy_(other);
  return values.as_strided({values.numel()}, {1});
}

void GatheredParameter::restore() { show(is_attached_ ? attached_ : detached_); }

bool GatheredParameter::is_gathered(const at::Tensor& tensor) { return owner_of(tensor) != nullptr; }

NoGathers::NoGathers(const char* reason) noexcept : before_(std::exchange(no_gathers, reason)) {}
NoGathers::~NoGathers() { no_gathers = before_; }

std::shared_ptr<GatheredMemory> GatheredParameter::kept_by(const at::Tensor& tensor) {
  const Owner* owner = owner_of(tensor);
  return owner ? owner->kept : nullptr;
}

}  // namespace ddpkit
