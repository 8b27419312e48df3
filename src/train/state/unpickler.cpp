#include <bit>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "train/state/pickle_machine.h"
#include "train/state/pickler.h"
#include "train/state/type_names.h"

namespace ddpkit::train {
namespace pickle {
namespace {

/// A pickle may repeat one value many times. Memory for reading, and again for conversion, is limited to kSlack plus
/// kGrowth times the pickle's length.
constexpr std::size_t kSlack = std::size_t{1} << 20, kGrowth = 4;

}  // namespace

StateValue Machine::run() {
  budget_ = kSlack + kGrowth * pickle_.size();
  while (true) {
    const auto opcode = static_cast<Opcode>(static_cast<unsigned char>(take(1)[0]));
    if (opcode == Opcode::kStop) break;
    step(opcode);
  }
  budget_ = kSlack + kGrowth * pickle_.size();
  Node& result = pop();
  if (!stack_.empty() || !marks_.empty()) throw BadFile("its pickle ends in the middle of a value");
  return convert(result, 0);
}

void Machine::step(Opcode opcode) {
  switch (opcode) {
    case Opcode::kProto:
      if (const int version = number<std::uint8_t>(); version != kProtocol)
        throw BadFile(
            fmt::format("its pickle is of protocol {}, where torch.save writes {} by default", version, kProtocol));
      return;
    case Opcode::kMark:
      return marks_.push_back(stack_.size());
    case Opcode::kNone:
      return push(std::monostate());
    case Opcode::kNewtrue:
      return push(true);
    case Opcode::kNewfalse:
      return push(false);
    case Opcode::kBinint:
      return push(static_cast<std::int64_t>(number<std::int32_t>()));
    case Opcode::kBinint1:
      return push(static_cast<std::int64_t>(number<std::uint8_t>()));
    case Opcode::kBinint2:
      return push(static_cast<std::int64_t>(number<std::uint16_t>()));
    case Opcode::kLong1:
      return long_number();
    case Opcode::kBinfloat: {
      std::uint64_t bits = 0;
      for (const char byte : take(8)) bits = bits << 8 | static_cast<unsigned char>(byte);
      return push(std::bit_cast<double>(bits));
    }
    case Opcode::kBinunicode: {
      const auto bytes = number<std::uint32_t>();
      return push(std::string(take(bytes)));
    }
    case Opcode::kEmptyTuple:
      return push(Tuple());
    case Opcode::kTuple:
      return push(Tuple{pop_to_mark()});
    case Opcode::kTuple1:
      return push(Tuple{pop_some(1)});
    case Opcode::kTuple2:
      return push(Tuple{pop_some(2)});
    case Opcode::kTuple3:
      return push(Tuple{pop_some(3)});
    case Opcode::kEmptyList:
      return push(List());
    case Opcode::kAppend: {
      Node& item = pop();
      return top<List>().items.push_back(&item);
    }
    case Opcode::kAppends: {
      const std::vector<Node*> items = pop_to_mark();
      List& list = top<List>();
      list.items.insert(list.items.end(), items.begin(), items.end());
      return;
    }
    case Opcode::kEmptyDict:
      return push(Dict());
    case Opcode::kSetitem: {
      const std::vector<Node*> items = pop_some(2);
      return set_items(top<Dict>(), items);
    }
    case Opcode::kSetitems: {
      const std::vector<Node*> items = pop_to_mark();
      return set_items(top<Dict>(), items);
    }
    case Opcode::kBinget:
      return get(number<std::uint8_t>());
    case Opcode::kLongBinget:
      return get(number<std::uint32_t>());
    case Opcode::kBinput:
      return put(number<std::uint8_t>());
    case Opcode::kLongBinput:
      return put(number<std::uint32_t>());
    case Opcode::kGlobal: {
      const std::string_view module = line();
      return push(Global{fmt::format("{}.{}", module, line())});
    }
    case Opcode::kBinpersid:
      return load_storage();
    case Opcode::kReduce:
      return reduce();
    case Opcode::kNewobj:
      pop();
      throw BadFile(fmt::format("its pickle wants to make a {}, which no state dict needs", as<Global>(pop()).name));
    case Opcode::kBuild:
      return build();
    case Opcode::kStop:
      break;
  }
  throw BadFile(fmt::format("its pickle has the opcode 0x{:02x}, which no state dict needs", static_cast<int>(opcode)));
}

void Machine::get(std::uint32_t index) {
  const auto found = memo_.find(index);
  if (found == memo_.end()) throw BadFile(fmt::format("its pickle asks for value {}, which it has not noted", index));
  stack_.push_back(found->second);
}

void Machine::put(std::uint32_t index) {
  if (stack_.empty()) throw BadFile("its pickle notes a value that is not there");
  memo_[index] = stack_.back();
}

void Machine::long_number() {
  std::size_t bytes = number<std::uint8_t>();
  std::string_view digits = take(bytes);
  if (bytes > 8) {
    // Skips redundant bytes that repeat the sign.
    std::size_t used = bytes;
    while (used > 1 &&
           static_cast<signed char>(digits[used - 1]) == (static_cast<signed char>(digits[used - 2]) < 0 ? -1 : 0))
      --used;
    if (used > 8) return push(StateValue(StateBigInt{std::string(digits.substr(0, used))}));
    digits = digits.substr(0, used);
    bytes = used;
  }
  std::uint64_t value = bytes > 0 && (digits.back() & 0x80) != 0 ? ~std::uint64_t{0} : 0;
  for (std::size_t i = bytes; i-- > 0;) value = value << 8 | static_cast<unsigned char>(digits[i]);
  push(static_cast<std::int64_t>(value));
}

/// ('storage', torch.FloatStorage, key, location, elements)
void Machine::load_storage() {
  const std::vector<Node*> id = as<Tuple>(pop()).items;
  if (id.size() != 5 || as<std::string>(*id[0]) != "storage")
    throw BadFile("its pickle refers to something that is no storage");
  const std::string& type = as<Global>(*id[1]).name;
  std::optional<c10::ScalarType> dtype;
  if (type != "torch.storage.UntypedStorage") {
    if (type.starts_with("torch.")) dtype = dtype_of_storage(std::string_view(type).substr(6));
    if (!dtype) throw BadFile(fmt::format("it has a storage of the type {}, which is not known here", type));
  }
  const std::string& key = as<std::string>(*id[2]);
  const std::int64_t count = as<std::int64_t>(*id[4]);
  auto found = storages_.find(key);
  if (found == storages_.end()) found = storages_.emplace(key, read_storage_(key)).first;
  const std::size_t size = dtype ? c10::elementSize(*dtype) : 1, bytes = found->second.nbytes();
  if (count < 0 || bytes % size != 0 || static_cast<std::uint64_t>(count) != bytes / size)
    throw BadFile(fmt::format("its record data/{} has {} bytes, where its pickle wants {} elements of {}", key, bytes,
                              count, size));
  push(TypedStorage{found->second, dtype});
}

/// Sets the attributes of an OrderedDict: a module's _metadata, which LibTorch's modules do not use.
void Machine::build() {
  Node& state = pop();
  top<Dict>();
  for (const auto& [key, value] : as<Dict>(state).items) {
    if (const std::string& name = as<std::string>(*key); name != "_metadata")
      throw BadFile(fmt::format("it has a dict with the attribute {}, which C++ has no place for", name));
  }
}

void Machine::pay(std::size_t amount) {
  if (amount > budget_) throw BadFile("its pickle unfolds to many times its own length");
  budget_ -= amount;
}

std::vector<StateValue> Machine::convert_all(const std::vector<Node*>& nodes, int depth) {
  std::vector<StateValue> values;
  for (Node* node : nodes) values.push_back(convert(*node, depth + 1));
  return values;
}

StateValue Machine::convert(Node& node, int depth) {
  if (depth > kDeepest) throw BadFile(fmt::format("it is nested deeper than {}", kDeepest));
  pay(1);
  return std::visit(
      [&](auto& held) -> StateValue {
        using T = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<T, std::monostate>) {
          return {};
        } else if constexpr (std::is_same_v<T, List>) {
          return convert_all(held.items, depth);
        } else if constexpr (std::is_same_v<T, Tuple>) {
          return StateTuple{convert_all(held.items, depth)};
        } else if constexpr (std::is_same_v<T, Set>) {
          return StateSet{convert_all(held.items, depth)};
        } else if constexpr (std::is_same_v<T, Dict>) {
          StateDict dict;
          dict.set_kind(held.kind);
          for (const auto& [key, value] : held.items) dict[convert_key(*key, depth + 1)] = convert(*value, depth + 1);
          return dict;
        } else if constexpr (std::is_same_v<T, Global>) {
          const std::string_view name = held.name;
          if (const auto dtype = name.starts_with("torch.") ? dtype_of_name(name.substr(6)) : std::nullopt)
            return *dtype;
          throw BadFile(fmt::format("its pickle holds {}, which no state dict needs", held.name));
        } else if constexpr (std::is_same_v<T, TypedStorage>) {
          throw BadFile("its pickle holds a storage outside of a tensor");
        } else {
          if constexpr (std::is_same_v<T, std::string>) pay(held.size());
          if constexpr (std::is_same_v<T, StateValue>) {
            if (const auto* bytes = held.template get_if<StateBytes>()) pay(bytes->bytes.size());
          }
          return held;
        }
      },
      node.value);
}

StateKey Machine::convert_key(Node& node, int depth) {
  const StateValue key = convert(node, depth);
  if (const auto* text = key.get_if<std::string>()) return *text;
  if (const auto* number = key.get_if<std::int64_t>()) return *number;
  try {
    return OtherStateKey(key);
  } catch (const InvalidArgument& error) {
    throw BadFile(error.what());
  }
}

}  // namespace pickle

StateValue unpickle(std::string_view pickle, const std::function<c10::Storage(const std::string& key)>& storage) {
  return pickle::Machine(pickle, storage).run();
}

}  // namespace ddpkit::train
