// A machine for the opcodes of state dicts, after Python's Lib/pickle.py and torch/_weights_only_unpickler.py. Nothing
// is called: a global is a name, and what REDUCE makes of the few that are known is written here.
#include <ATen/ops/empty.h>

#include <bit>
#include <cstring>
#include <deque>
#include <optional>
#include <unordered_map>

#include <fmt/format.h>

#include "input_file.h"
#include "pickle_opcodes.h"
#include "pickler.h"
#include "type_names.h"

namespace ddpkit::train {
namespace {

/// Most dimensions that a tensor is believed to have.
constexpr std::size_t kDimensions = 64;
/// A pickle may name one value in many places. What it may grow to thereby: this and a few times its own length.
constexpr std::size_t kSlack = std::size_t{1} << 20, kGrowth = 4;

struct Node;
struct Global {
  std::string name;  ///< "collections.OrderedDict"
};
struct TypedStorage {
  c10::Storage storage;
  std::optional<c10::ScalarType> dtype;  ///< Empty: untyped.
};
struct List {
  std::vector<Node*> items;
};
struct Tuple {
  std::vector<Node*> items;
};
struct Dict {
  std::vector<std::pair<Node*, Node*>> items;
};
struct Node {
  std::variant<std::monostate, bool, std::int64_t, double, std::string, at::Tensor, List, Tuple, Dict, Global,
               TypedStorage>
      value;
};

/// LibTorch allows it for these types.
void require_grad(at::Tensor& tensor) {
  if (tensor.is_floating_point() || tensor.is_complex()) tensor.requires_grad_(true);
}

class Machine {
 public:
  using ReadStorage = std::function<c10::Storage(const std::string& key)>;

  Machine(std::string_view pickle, const ReadStorage& storage) : pickle_(pickle), read_storage_(storage) {}

  StateValue run() {
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

 private:
  std::string_view take(std::size_t bytes) {
    if (bytes > pickle_.size() - next_) throw BadFile("its pickle ends in the middle of a value");
    return pickle_.substr(std::exchange(next_, next_ + bytes), bytes);
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view line() {
    const std::size_t end = pickle_.find('\n', next_);
    if (end == std::string_view::npos) throw BadFile("its pickle ends in the middle of a name");
    const std::string_view text = take(end - next_);
    take(1);
    return text;
  }

  template <class T>
  void push(T value) {
    stack_.push_back(&nodes_.emplace_back(Node{std::move(value)}));
  }
  Node& pop() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back()))
      throw BadFile("its pickle takes a value that is not there");
    Node& top = *stack_.back();
    stack_.pop_back();
    return top;
  }
  std::vector<Node*> pop_some(std::size_t count) {
    std::vector<Node*> items(count);
    for (std::size_t i = count; i-- > 0;) items[i] = &pop();
    return items;
  }
  std::vector<Node*> pop_to_mark() {
    if (marks_.empty()) throw BadFile("its pickle lacks a mark");
    const auto begin = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<Node*> items(begin, stack_.end());
    stack_.erase(begin, stack_.end());
    marks_.pop_back();
    return items;
  }
  template <class T>
  T& top() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back()))
      throw BadFile("its pickle adds to a value that is not there");
    return as<T>(*stack_.back());
  }
  template <class T>
  static T& as(Node& node) {
    if (T* value = std::get_if<T>(&node.value)) return *value;
    throw BadFile("its pickle has a value of another kind than is needed there");
  }
  static void set_items(Dict& dict, const std::vector<Node*>& items) {
    if (items.size() % 2 != 0) throw BadFile("its pickle has a key without a value");
    for (std::size_t i = 0; i < items.size(); i += 2) dict.items.emplace_back(items[i], items[i + 1]);
  }

  void step(Opcode opcode);
  void get(std::uint32_t index);
  void put(std::uint32_t index);
  void long_number();
  void load_storage();
  void reduce();
  void build();
  at::Tensor rebuild(const Tuple& arguments, std::optional<c10::ScalarType> dtype);
  std::vector<std::int64_t> shape(Node& node) const;
  StateValue convert(Node& node, int depth);
  std::vector<StateValue> convert_all(const std::vector<Node*>& nodes, int depth);
  void pay(std::size_t amount);

  std::string_view pickle_;
  const ReadStorage& read_storage_;
  std::size_t next_ = 0;
  std::deque<Node> nodes_;
  std::vector<Node*> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint32_t, Node*> memo_;
  std::unordered_map<std::string, c10::Storage> storages_;
  std::size_t budget_ = 0;
};

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
  const std::size_t bytes = number<std::uint8_t>();
  const std::string_view digits = take(bytes);
  if (bytes > 8) throw BadFile("its pickle has an integer of more than 64 bits");
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

std::vector<std::int64_t> Machine::shape(Node& node) const {
  const std::vector<Node*>& items = as<Tuple>(node).items;
  if (items.size() > kDimensions) throw BadFile(fmt::format("it has a tensor of {} dimensions", items.size()));
  std::vector<std::int64_t> numbers;
  for (Node* item : items) numbers.push_back(as<std::int64_t>(*item));
  return numbers;
}

/// (storage, offset, sizes, strides, requires_grad, backward hooks ...)
at::Tensor Machine::rebuild(const Tuple& arguments, std::optional<c10::ScalarType> dtype) {
  const auto& [storage, type] = as<TypedStorage>(*arguments.items[0]);
  if (type.has_value() == dtype.has_value()) throw BadFile("it has a tensor whose type is not that of its storage");
  if (!dtype) dtype = type;
  const std::int64_t offset = as<std::int64_t>(*arguments.items[1]);
  const std::vector<std::int64_t> sizes = shape(*arguments.items[2]), strides = shape(*arguments.items[3]);
  // The place behind the last element, which must lie in the storage.
  std::int64_t numel = 1, end = offset;
  bool sane = offset >= 0 && sizes.size() == strides.size();
  for (std::size_t d = 0; sane && d < sizes.size(); ++d) {
    std::int64_t span = 0;
    sane = sizes[d] >= 0 && strides[d] >= 0 && !__builtin_mul_overflow(numel, sizes[d], &numel) &&
           (sizes[d] == 0 ||
            (!__builtin_mul_overflow(sizes[d] - 1, strides[d], &span) && !__builtin_add_overflow(end, span, &end)));
  }
  const auto room = static_cast<std::int64_t>(storage.nbytes() / c10::elementSize(*dtype));
  if (!sane || (numel > 0 && end >= room))
    throw BadFile(fmt::format("it has a tensor that reaches beyond its storage of {} elements", room));
  at::Tensor tensor = at::empty({0}, at::TensorOptions(*dtype));
  tensor.set_(storage, numel > 0 ? offset : 0, sizes, strides);
  if (as<bool>(*arguments.items[4])) require_grad(tensor);
  return tensor;
}

void Machine::reduce() {
  Tuple& arguments = as<Tuple>(pop());
  const std::string& name = as<Global>(pop()).name;
  const std::size_t count = arguments.items.size();
  if (name == "collections.OrderedDict" && count == 0) {
    push(Dict());
  } else if (name == "torch.Size" && count == 1) {
    push(Tuple(as<Tuple>(*arguments.items[0])));
  } else if (name == "torch._utils._rebuild_tensor_v2" && (count == 6 || count == 7)) {
    push(rebuild(arguments, std::nullopt));
  } else if (name == "torch._utils._rebuild_tensor_v3" && (count == 7 || count == 8)) {
    const std::string& type = as<Global>(*arguments.items[6]).name;
    const auto dtype = type.starts_with("torch.") ? dtype_of_name(std::string_view(type).substr(6)) : std::nullopt;
    if (!dtype) throw BadFile(fmt::format("it has a tensor of the type {}, which is not known here", type));
    push(rebuild(arguments, dtype));
  } else if (name == "torch._utils._rebuild_parameter" && count == 3) {
    at::Tensor parameter = as<at::Tensor>(*arguments.items[0]).detach();
    if (as<bool>(*arguments.items[1])) require_grad(parameter);
    push(parameter);
  } else {
    throw BadFile(fmt::format("its pickle wants to call {}, which no state dict needs", name));
  }
}

/// What an OrderedDict has beside its items: a module's _metadata, which LibTorch's modules do not use.
void Machine::build() {
  pop();
  top<Dict>();
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
        } else if constexpr (std::is_same_v<T, Dict>) {
          StateDict dict;
          for (const auto& [key, value] : held.items) {
            const auto* text = std::get_if<std::string>(&key->value);
            if (text) pay(text->size());
            dict[text ? StateKey(*text) : StateKey(as<std::int64_t>(*key))] = convert(*value, depth + 1);
          }
          return dict;
        } else if constexpr (std::is_same_v<T, Global>) {
          throw BadFile(fmt::format("its pickle holds {}, which no state dict needs", held.name));
        } else if constexpr (std::is_same_v<T, TypedStorage>) {
          throw BadFile("its pickle holds a storage outside of a tensor");
        } else {
          if constexpr (std::is_same_v<T, std::string>) pay(held.size());
          return held;
        }
      },
      node.value);
}

}  // namespace

StateValue unpickle(std::string_view pickle, const std::function<c10::Storage(const std::string& key)>& storage) {
  return Machine(pickle, storage).run();
}

}  // namespace ddpkit::train
