// Tier 1. Executes the opcodes of state dicts, after Python's Lib/pickle.py and torch/_weights_only_unpickler.py. It
// calls no functions: a global is only a name, and pickle_calls.cpp implements REDUCE for the few known names.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <ddpkit/train/state_dict.h>

#include "train/state/input_file.h"
#include "train/state/pickle_opcodes.h"

namespace ddpkit::train::pickle {

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
struct Set {
  std::vector<Node*> items;
};
struct Dict {
  std::vector<std::pair<Node*, Node*>> items;
  StateDict::Kind kind = StateDict::Kind::kDict;
};
struct Node {
  /// StateValue: for types that contain no other values and need no rebuilding.
  std::variant<std::monostate, bool, std::int64_t, double, std::string, at::Tensor, List, Tuple, Set, Dict, Global,
               TypedStorage, StateValue>
      value;
};

template <class T>
T& as(Node& node) {
  if (T* value = std::get_if<T>(&node.value)) return *value;
  throw BadFile("its pickle has a value of another kind than is needed there");
}

/// Creates a tensor as a function of torch._utils does. Returns nothing for an unknown function or number of arguments.
std::optional<at::Tensor> rebuild_tensor(std::string_view function, const std::vector<Node*>& arguments);

class Machine {
 public:
  using ReadStorage = std::function<c10::Storage(const std::string& key)>;

  Machine(std::string_view pickle, const ReadStorage& storage) : pickle_(pickle), read_storage_(storage) {}

  StateValue run();

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
  void make_bytes(const std::vector<Node*>& arguments, bool is_bytearray);
  void make_dict(StateDict::Kind kind, const std::vector<Node*>& arguments);
  StateValue convert(Node& node, int depth);
  StateKey convert_key(Node& node, int depth);
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

}  // namespace ddpkit::train::pickle
