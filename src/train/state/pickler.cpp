#include "train/state/pickler.h"

#include <ATen/ops/empty.h>

#include <bit>
#include <limits>
#include <type_traits>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "train/state/pickle_opcodes.h"
#include "train/state/type_names.h"

namespace ddpkit::train {
namespace {

void put(std::string& pickle, Opcode opcode) { pickle.push_back(static_cast<char>(opcode)); }

/// Writes `bytes` bytes of a number, little-endian.
void put_number(std::string& pickle, std::uint64_t number, int bytes) {
  for (int i = 0; i < bytes; ++i) pickle.push_back(static_cast<char>(number >> (8 * i)));
}

/// The reader accepts only as many indices as the file holds: makes expanded tensors contiguous.
at::Tensor written_out(const at::Tensor& indices) {
  const std::size_t bytes = static_cast<std::size_t>(indices.numel()) * indices.element_size();
  return bytes > indices.storage().nbytes() ? indices.contiguous() : indices;
}

}  // namespace

Pickler::Pickler(const StateValue& value) {
  put(pickle_, Opcode::kProto);
  pickle_.push_back(static_cast<char>(kProtocol));
  write(value, 0);
  put(pickle_, Opcode::kStop);
}

void Pickler::write(const StateValue& value, int depth) {
  if (depth > kDeepest) throw InvalidArgument(fmt::format("a state dict is nested deeper than {}", kDeepest));
  const auto items = [&](const std::vector<StateValue>& values) {
    put(pickle_, Opcode::kMark);
    for (const StateValue& item : values) write(item, depth + 1);
  };
  std::visit(
      [&](const auto& held) {
        using T = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<T, std::monostate>) {
          put(pickle_, Opcode::kNone);
        } else if constexpr (std::is_same_v<T, StateList>) {
          put(pickle_, Opcode::kEmptyList);
          items(held);
          put(pickle_, Opcode::kAppends);
        } else if constexpr (std::is_same_v<T, StateTuple>) {
          items(held.items);
          put(pickle_, Opcode::kTuple);
        } else if constexpr (std::is_same_v<T, StateSet>) {
          global("__builtin__", "set");
          put(pickle_, Opcode::kMark);
          put(pickle_, Opcode::kEmptyList);
          items(held.items);
          put(pickle_, Opcode::kAppends);
          call();
        } else if constexpr (std::is_same_v<T, StateDict>) {
          write(held, depth);
        } else {
          write(held);
        }
      },
      value.variant());
}

void Pickler::write(const StateDict& dict, int depth) {
  if (dict.kind() == StateDict::Kind::kDict) {
    put(pickle_, Opcode::kEmptyDict);
  } else {
    global("collections", dict.kind() == StateDict::Kind::kCounter ? "Counter" : "OrderedDict");
    put(pickle_, Opcode::kMark);
    call();
  }
  put(pickle_, Opcode::kMark);
  for (const StateItem& item : dict) {
    std::visit(
        [&](const auto& key) {
          if constexpr (std::is_same_v<std::decay_t<decltype(key)>, OtherStateKey>)
            write(key.value(), depth + 1);
          else
            write(key);
        },
        item.key);
    write(item.value, depth + 1);
  }
  put(pickle_, Opcode::kSetitems);
}

void Pickler::call() {
  put(pickle_, Opcode::kTuple);
  put(pickle_, Opcode::kReduce);
}

void Pickler::write(bool value) { put(pickle_, value ? Opcode::kNewtrue : Opcode::kNewfalse); }

void Pickler::write(double value) {
  put(pickle_, Opcode::kBinfloat);
  const auto bits = std::bit_cast<std::uint64_t>(value);
  for (int shift = 56; shift >= 0; shift -= 8) pickle_.push_back(static_cast<char>(bits >> shift));
}

void Pickler::write(const std::complex<double>& value) {
  global("__builtin__", "complex");
  put(pickle_, Opcode::kMark);
  write(value.real());
  write(value.imag());
  call();
}

/// Protocol 2 has no bytes type: writes a str of the characters 0 to 255.
void Pickler::write(const StateBytes& bytes) {
  std::string text;
  for (const char c : bytes.bytes) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x80) text.push_back(static_cast<char>(0xc0 | byte >> 6));
    text.push_back(byte >= 0x80 ? static_cast<char>(0x80 | (byte & 0x3f)) : c);
  }
  bytes.is_bytearray ? global("__builtin__", "bytearray") : global("_codecs", "encode");
  put(pickle_, Opcode::kMark);
  write(std::string_view(text));
  write(std::string_view("latin-1"));
  call();
}

void Pickler::write(const StateBigInt& value) {
  if (value.bytes.size() > 255) throw InvalidArgument("an int of more than 2040 bits is too long for a state dict");
  put(pickle_, Opcode::kLong1);
  pickle_.push_back(static_cast<char>(value.bytes.size()));
  pickle_ += value.bytes;
}

void Pickler::write(at::ScalarType dtype) {
  const std::string_view name = name_of(dtype);
  if (name.empty()) throw InvalidArgument(fmt::format("a state dict cannot hold the dtype {}", c10::toString(dtype)));
  global("torch", name);
}

void Pickler::write(const c10::Device& device) {
  global("torch", "device");
  put(pickle_, Opcode::kMark);
  write(std::string_view(c10::DeviceTypeName(device.type(), /*lower_case=*/true)));
  if (device.has_index()) write(std::int64_t{device.index()});
  call();
}

void Pickler::write(c10::Layout layout) {
  global("torch.serialization", "_get_layout");
  put(pickle_, Opcode::kMark);
  write(std::string_view(layout_name(layout)));
  call();
}

void Pickler::write(std::int64_t value) {
  if (value >= std::numeric_limits<std::int32_t>::min() && value <= std::numeric_limits<std::int32_t>::max()) {
    put(pickle_, Opcode::kBinint);
    put_number(pickle_, static_cast<std::uint64_t>(value), 4);
  } else {
    put(pickle_, Opcode::kLong1);
    pickle_.push_back(8);
    put_number(pickle_, static_cast<std::uint64_t>(value), 8);
  }
}

void Pickler::write(std::string_view text) {
  if (text.size() > std::numeric_limits<std::uint32_t>::max())
    throw InvalidArgument(fmt::format("a string of {} bytes is too long for a state dict", text.size()));
  put(pickle_, Opcode::kBinunicode);
  put_number(pickle_, text.size(), 4);
  pickle_ += text;
}

void Pickler::write_shape(at::IntArrayRef numbers) {
  put(pickle_, Opcode::kMark);
  for (const std::int64_t number : numbers) write(number);
  put(pickle_, Opcode::kTuple);
}

void Pickler::global(std::string_view module, std::string_view name) {
  put(pickle_, Opcode::kGlobal);
  pickle_ += fmt::format("{}\n{}\n", module, name);
}

std::size_t Pickler::storage_number(const at::Tensor& tensor) {
  const auto [place, added] =
      numbers_.try_emplace({tensor.storage().unsafeGetStorageImpl(), tensor.scalar_type()}, storages_.size());
  if (added) {
    const auto bytes = static_cast<std::int64_t>(tensor.storage().nbytes());
    at::Tensor whole = at::empty({0}, at::TensorOptions(at::kByte).device(tensor.device()));
    whole.set_(tensor.storage(), 0, {bytes}, {1});
    storages_.push_back(whole.cpu());
    held_.push_back(tensor);
  }
  return place->second;
}

void Pickler::write(const at::Tensor& tensor) {
  if (!tensor.defined()) return put(pickle_, Opcode::kNone);
  if (tensor.is_quantized() || layout_name(tensor.layout()).empty() || name_of(tensor.scalar_type()).empty())
    throw InvalidArgument(fmt::format("a state dict cannot hold a {} tensor of layout {} on {}: make it dense first",
                                      c10::toString(tensor.scalar_type()), c10::str(tensor.layout()),
                                      tensor.device().str()));
  if (tensor.layout() != at::kStrided)
    write_sparse(tensor.detach());
  else if (tensor.is_meta())
    write_meta(tensor);
  else
    write_dense(tensor);
}

void Pickler::write_hooks() {
  global("collections", "OrderedDict");
  put(pickle_, Opcode::kEmptyTuple);
  put(pickle_, Opcode::kReduce);
}

void Pickler::write_dense(const at::Tensor& tensor) {
  const std::string_view storage = storage_name_of(tensor.scalar_type());
  const std::size_t number = storage_number(tensor);
  const auto bytes = static_cast<std::int64_t>(tensor.storage().nbytes());

  global("torch._utils", storage.empty() ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
  put(pickle_, Opcode::kMark);
  put(pickle_, Opcode::kMark);
  write(std::string_view("storage"));
  storage.empty() ? global("torch.storage", "UntypedStorage") : global("torch", storage);
  write(std::string_view(std::to_string(number)));
  write(std::string_view("cpu"));
  write(storage.empty() ? bytes : bytes / static_cast<std::int64_t>(tensor.element_size()));
  put(pickle_, Opcode::kTuple);
  put(pickle_, Opcode::kBinpersid);
  write(tensor.storage_offset());
  write_shape(tensor.sizes());
  write_shape(tensor.strides());
  write(tensor.requires_grad());
  write_hooks();
  if (storage.empty()) write(tensor.scalar_type());
  if (tensor.is_conj() || tensor.is_neg()) {
    // Elements are written as in memory.
    put(pickle_, Opcode::kEmptyDict);
    put(pickle_, Opcode::kMark);
    for (const auto& [name, is_set] : {std::pair("conj", tensor.is_conj()), std::pair("neg", tensor.is_neg())}) {
      if (!is_set) continue;  // PyTorch rejects a conj bit of a real tensor, even if it is false.
      write(std::string_view(name));
      write(true);
    }
    put(pickle_, Opcode::kSetitems);
  }
  call();
}

/// (layout, (indices, values, sizes, is_coalesced)), or (layout, (compressed indices, plain indices, values, sizes)).
void Pickler::write_sparse(const at::Tensor& tensor) {
  global("torch._utils", "_rebuild_sparse_tensor");
  put(pickle_, Opcode::kMark);
  write(tensor.layout());
  put(pickle_, Opcode::kMark);
  if (tensor.layout() == at::kSparse) {
    write(written_out(tensor._indices()));
    write(tensor._values());
    write_shape(tensor.sizes());
    write(tensor.is_coalesced());
  } else {
    const bool by_rows = tensor.layout() == at::kSparseCsr || tensor.layout() == at::kSparseBsr;
    write(written_out(by_rows ? tensor.crow_indices() : tensor.ccol_indices()));
    write(written_out(by_rows ? tensor.col_indices() : tensor.row_indices()));
    write(tensor.values());
    write_shape(tensor.sizes());
  }
  put(pickle_, Opcode::kTuple);
  call();
}

void Pickler::write_meta(const at::Tensor& tensor) {
  global("torch._utils", "_rebuild_meta_tensor_no_storage");
  put(pickle_, Opcode::kMark);
  write(tensor.scalar_type());
  write_shape(tensor.sizes());
  write_shape(tensor.strides());
  write(tensor.requires_grad());
  call();
}

}  // namespace ddpkit::train
