#include "pickler.h"

#include <ATen/ops/empty.h>

#include <bit>
#include <limits>
#include <type_traits>

#include <fmt/format.h>

#include <ddpkit/comm/error.h>

#include "pickle_opcodes.h"
#include "type_names.h"

namespace ddpkit::train {
namespace {

void put(std::string& pickle, Opcode opcode) { pickle.push_back(static_cast<char>(opcode)); }

/// `bytes` of a number, the lowest first.
void put_number(std::string& pickle, std::uint64_t number, int bytes) {
  for (int i = 0; i < bytes; ++i) pickle.push_back(static_cast<char>(number >> (8 * i)));
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
        } else if constexpr (std::is_same_v<T, bool>) {
          put(pickle_, held ? Opcode::kNewtrue : Opcode::kNewfalse);
        } else if constexpr (std::is_same_v<T, double>) {
          put(pickle_, Opcode::kBinfloat);
          const auto bits = std::bit_cast<std::uint64_t>(held);
          for (int shift = 56; shift >= 0; shift -= 8) pickle_.push_back(static_cast<char>(bits >> shift));
        } else if constexpr (std::is_same_v<T, StateList>) {
          put(pickle_, Opcode::kEmptyList);
          items(held);
          put(pickle_, Opcode::kAppends);
        } else if constexpr (std::is_same_v<T, StateTuple>) {
          items(held.items);
          put(pickle_, Opcode::kTuple);
        } else if constexpr (std::is_same_v<T, StateDict>) {
          put(pickle_, Opcode::kEmptyDict);
          put(pickle_, Opcode::kMark);
          for (const StateItem& item : held) {
            std::visit([&](const auto& key) { write(key); }, item.key);
            write(item.value, depth + 1);
          }
          put(pickle_, Opcode::kSetitems);
        } else {
          write(held);
        }
      },
      value.variant());
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

void Pickler::write(const at::Tensor& given) {
  if (!given.defined()) return put(pickle_, Opcode::kNone);
  const std::string_view name = name_of(given.scalar_type());
  if (given.layout() != at::kStrided || given.is_meta() || name.empty())
    throw InvalidArgument(fmt::format("a state dict cannot hold a {} tensor of layout {} on {}: make it dense first",
                                      c10::toString(given.scalar_type()), c10::str(given.layout()),
                                      given.device().str()));
  const at::Tensor tensor = given.detach().resolve_conj().resolve_neg();
  const std::string_view storage = storage_name_of(tensor.scalar_type());
  const std::size_t number = storage_number(tensor);
  const auto bytes = static_cast<std::int64_t>(tensor.storage().nbytes());

  global("torch._utils", storage.empty() ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
  put(pickle_, Opcode::kMark);
  put(pickle_, Opcode::kMark);
  write("storage");
  storage.empty() ? global("torch.storage", "UntypedStorage") : global("torch", storage);
  write(std::to_string(number));
  write("cpu");
  write(storage.empty() ? bytes : bytes / tensor.element_size());
  put(pickle_, Opcode::kTuple);
  put(pickle_, Opcode::kBinpersid);
  write(tensor.storage_offset());
  write_shape(tensor.sizes());
  write_shape(tensor.strides());
  put(pickle_, given.requires_grad() ? Opcode::kNewtrue : Opcode::kNewfalse);
  global("collections", "OrderedDict");  // Of backward hooks.
  put(pickle_, Opcode::kEmptyTuple);
  put(pickle_, Opcode::kReduce);
  if (storage.empty()) global("torch", name);
  put(pickle_, Opcode::kTuple);
  put(pickle_, Opcode::kReduce);
}

}  // namespace ddpkit::train
