// The functions that a pickle may call, except those that create tensors.
#include <fmt/format.h>

#include "train/state/pickle_machine.h"
#include "train/state/type_names.h"

namespace ddpkit::train::pickle {
namespace {

/// Converts the characters 0 to 255 of a Python str to bytes.
std::string bytes_of(std::string_view text) {
  std::string bytes;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto lead = static_cast<unsigned char>(text[i]);
    if (lead < 0x80) {
      bytes.push_back(text[i]);
    } else if ((lead == 0xc2 || lead == 0xc3) && i + 1 < text.size() && (text[i + 1] & 0xc0) == 0x80) {
      bytes.push_back(static_cast<char>((lead & 3) << 6 | (text[++i] & 0x3f)));
    } else {
      throw BadFile("its bytes have a character that is no byte");
    }
  }
  return bytes;
}

/// Pickles of protocol 2 contain Python 2's names, even from Python 3.
std::string_view builtin(std::string_view name) {
  for (const std::string_view module : {"__builtin__.", "builtins."}) {
    if (name.starts_with(module)) return name.substr(module.size());
  }
  return {};
}

double real_number(Node& node) {
  const auto* integer = std::get_if<std::int64_t>(&node.value);
  return integer ? static_cast<double>(*integer) : as<double>(node);
}

}  // namespace

void Machine::make_bytes(const std::vector<Node*>& arguments, bool is_bytearray) {
  std::string bytes;
  const auto* given = arguments.empty() ? nullptr : std::get_if<StateValue>(&arguments[0]->value);
  if (given && given->get_if<StateBytes>()) {
    bytes = given->get_if<StateBytes>()->bytes;
    pay(bytes.size());
  } else if (!arguments.empty()) {
    const std::string& text = as<std::string>(*arguments[0]);
    const std::string codec = arguments.size() > 1 ? as<std::string>(*arguments[1]) : "utf-8";
    if (codec != "latin1" && codec != "latin-1")
      throw BadFile(fmt::format("it has bytes in the encoding {}, which is not known here", codec));
    pay(text.size());
    bytes = bytes_of(text);
  }
  push(StateValue(StateBytes{std::move(bytes), is_bytearray}));
}

/// `items`: pairs, the format of Python 2 for an OrderedDict.
void Machine::make_dict(StateDict::Kind kind, const std::vector<Node*>& arguments) {
  Dict dict{{}, kind};
  if (!arguments.empty()) {
    Node& items = *arguments[0];
    if (const Dict* given = std::get_if<Dict>(&items.value)) {
      dict.items = given->items;
    } else {
      for (Node* pair : as<List>(items).items) {
        const auto* list = std::get_if<List>(&pair->value);
        const std::vector<Node*>& both = list ? list->items : as<Tuple>(*pair).items;
        if (kind == StateDict::Kind::kCounter || both.size() != 2) throw BadFile("its pickle has a damaged dict");
        dict.items.emplace_back(both[0], both[1]);
      }
    }
    pay(dict.items.size());
  }
  push(std::move(dict));
}

void Machine::reduce() {
  const std::vector<Node*> arguments = as<Tuple>(pop()).items;
  const std::string& name = as<Global>(pop()).name;
  const std::string_view function = builtin(name);
  const std::size_t count = arguments.size();
  constexpr std::string_view kUtils = "torch._utils.";
  if (name.starts_with(kUtils)) {
    if (auto tensor = rebuild_tensor(std::string_view(name).substr(kUtils.size()), arguments)) return push(*tensor);
  }
  if (name == "collections.OrderedDict" && count <= 1) {
    make_dict(StateDict::Kind::kOrderedDict, arguments);
  } else if (name == "collections.Counter" && count <= 1) {
    make_dict(StateDict::Kind::kCounter, arguments);
  } else if (name == "torch.Size" && count == 1) {
    pay(as<Tuple>(*arguments[0]).items.size());
    push(Tuple(as<Tuple>(*arguments[0])));
  } else if (name == "torch.device" && (count == 1 || count == 2)) {
    const std::string& type = as<std::string>(*arguments[0]);
    push(StateValue(c10::Device(count == 1 ? type : fmt::format("{}:{}", type, as<std::int64_t>(*arguments[1])))));
  } else if (name == "torch.serialization._get_layout" && count == 1) {
    const std::string& layout = as<std::string>(*arguments[0]);
    if (!layout_of_name(layout)) throw BadFile(fmt::format("it has the layout {}, which is not known here", layout));
    push(StateValue(*layout_of_name(layout)));
  } else if (name == "_codecs.encode" && (count == 1 || count == 2)) {
    make_bytes(arguments, /*is_bytearray=*/false);
  } else if (function == "bytearray" && count <= 2) {
    make_bytes(arguments, /*is_bytearray=*/true);
  } else if (function == "bytes" && count == 0) {
    make_bytes(arguments, /*is_bytearray=*/false);
  } else if (function == "set" && count <= 1) {
    Set set;
    if (count == 1) set.items = as<List>(*arguments[0]).items;
    pay(set.items.size());
    push(std::move(set));
  } else if (function == "complex" && count == 2) {
    push(StateValue(std::complex<double>(real_number(*arguments[0]), real_number(*arguments[1]))));
  } else {
    throw BadFile(fmt::format("its pickle wants to call {}, which no state dict needs", name));
  }
}

}  // namespace ddpkit::train::pickle
