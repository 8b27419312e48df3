#include <torch/torch.h>

#include <string_view>

#include <ddpkit/error.h>
#include <ddpkit/train/state_dict.h>

#include "support/catch.h"
#include "support/folder.h"
#include "train/state/crc32.h"
#include "train/state/pickler.h"
#include "train/state/zip_reader.h"

using namespace ddpkit::train;
using ddpkit::testing::Folder;
using ddpkit::testing::read_file;
using ddpkit::testing::write_file;

namespace {

StateDict example() {
  torch::manual_seed(1);
  const auto base = torch::randn({4, 6});
  return {{"base", base},
          {"row", base[1]},
          {"transposed", base.t()},
          {"bfloat16", torch::randn({3}).to(torch::kBFloat16)},
          {"empty", torch::empty({0, 3})},
          {"uint16", torch::ones({2}).to(torch::kUInt16)},
          {"none", {}},
          {"flag", true},
          {"float", -0.5},
          {"text", std::string("one\0two", 7)},
          {"list", StateList{1, std::int64_t{1} << 40, -3}},
          {"tuple", StateTuple{{0.9, 0.999}}},
          {"set", StateSet{{1, "a"}}},
          {"bytes", StateBytes{std::string("\0\x7f\x80\xff", 4)}},
          {"bytearray", StateBytes{"\xc3\xbc", /*is_bytearray=*/true}},
          {"2^64", StateBigInt{std::string(8, '\0') + "\1"}},
          {"complex", std::complex<double>(1, -0.5)},
          {"dtype", torch::kFloat8_e5m2},
          {"device", torch::Device("cuda:3")},
          {"layout", torch::kSparseCsr},
          {OtherStateKey(0.5), StateDict{{OtherStateKey(true), 1}, {OtherStateKey(StateTuple{{1, "x"}}), 2}}},
          {5, StateDict{{-1, "int keys"}}}};
}

/// Returns whether both are equal, tensors bit by bit.
bool same(const StateValue& a, const StateValue& b) {
  if (a.variant().index() != b.variant().index()) return false;
  if (const auto* tensor = a.get_if<at::Tensor>())
    return tensor->dtype() == b.to_tensor().dtype() && tensor->strides() == b.to_tensor().strides() &&
           torch::equal(*tensor, b.to_tensor());
  if (const auto* dict = a.get_if<StateDict>()) {
    const StateDict& other = b.to_dict();
    return dict->size() == other.size() && std::equal(dict->begin(), dict->end(), other.begin(), [](auto& x, auto& y) {
             return x.key == y.key && same(x.value, y.value);
           });
  }
  if (const auto* set = a.get_if<StateSet>())
    return same(StateList(set->items), StateList(b.get_if<StateSet>()->items));
  if (const auto* bytes = a.get_if<StateBytes>())
    return bytes->bytes == b.get_if<StateBytes>()->bytes && bytes->is_bytearray == b.get_if<StateBytes>()->is_bytearray;
  if (const auto* integer = a.get_if<StateBigInt>()) return integer->bytes == b.get_if<StateBigInt>()->bytes;
  if (a.get_if<StateList>() || a.get_if<StateTuple>())
    return std::equal(a.to_items().begin(), a.to_items().end(), b.to_items().begin(), b.to_items().end(), same);
  return std::visit(
      [&]<class T>(const T& held) {
        if constexpr (std::is_trivially_copyable_v<T> || std::is_same_v<T, std::string>)
          return held == *b.get_if<T>();
        else
          return false;
      },
      a.variant());
}

StateValue unpickled(const std::string& pickle) {
  return unpickle(pickle, [](const std::string&) { return torch::zeros({16}).storage(); });
}

/// Returns the pickle of a tensor in the float storage "0" of 16 elements. The numbers are inserted as given.
std::string tensor_pickle(const std::string& offset, const std::string& size, const std::string& stride,
                          const std::string& elements = "K\x10") {
  return "\x80\x02"
         "ctorch._utils\n_rebuild_tensor_v2\n((X\x07" +
         std::string(3, '\0') + "storagectorch\nFloatStorage\nX\x01" + std::string(3, '\0') + "0X\x03" +
         std::string(3, '\0') + "cpu" + elements + "tQ" + offset + size + "\x85" + stride +
         "\x85\x89"
         "ccollections\nOrderedDict\n)RtR.";
}

/// 2^60
const std::string kHuge = std::string("\x8a\x08", 2) + std::string(7, '\0') + "\x10";

struct Net : torch::nn::Module {
  torch::nn::Linear first{register_module("first", torch::nn::Linear(3, 4))};
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(4))};
  torch::Tensor scale = register_parameter("scale", torch::ones({4}));
};

std::vector<std::string> names_of(const StateDict& state) {
  std::vector<std::string> names;
  for (const auto& item : state) names.push_back(std::get<std::string>(item.key));
  return names;
}

}  // namespace

TEST_CASE("a state dict comes back as it was saved", "[state_dict]") {
  const Folder folder;
  const StateDict state = example();
  save_state_dict(folder / "state.pt", state);
  CHECK(ddpkit::testing::names_in(folder.path()) == std::vector<std::string>{"state.pt"});
  const StateValue loaded = load_state_dict(folder / "state.pt");
  CHECK(same(state, loaded));
  CHECK_FALSE(same(StateDict{}, loaded));
  const auto tensor = [&](const char* name) { return loaded.to_dict().at(name).to_tensor(); };
  // Both still share one storage.
  CHECK(tensor("row").storage().is_alias_of(tensor("base").storage()));
  CHECK(tensor("transposed").storage().is_alias_of(tensor("base").storage()));
  CHECK_FALSE(tensor("bfloat16").storage().is_alias_of(tensor("base").storage()));
  CHECK_THROWS_WITH(loaded.to_dict().at("other"), ContainsSubstring("no 'other'"));
  CHECK_THROWS_WITH(loaded.to_dict().at("flag").to_tensor(), ContainsSubstring("has a bool where a tensor"));
}

TEST_CASE("tensors that a state dict cannot hold are refused before anything is written", "[state_dict]") {
  const Folder folder;
  const auto refuse = [&](const StateValue& value, const char* reason) {
    CHECK_THROWS_WITH(save_state_dict(folder / "state.pt", StateDict{{"x", value}}), ContainsSubstring(reason));
  };
  refuse(torch::quantize_per_tensor(torch::ones({3}), 0.1, 0, torch::kQInt8), "make it dense");
  for (const StateValue& value : std::vector<StateValue>{StateList{1}, StateTuple{{torch::ones({1})}}, StateDict{}})
    CHECK_THROWS_WITH(OtherStateKey(value), ContainsSubstring("cannot be a key"));
  StateValue deep = 1;
  for (int i = 0; i < 101; ++i) deep = StateList{deep};
  refuse(deep, "nested deeper than 100");
  CHECK(ddpkit::testing::names_in(folder.path()).empty());
  CHECK_THROWS_AS(save_state_dict("/nonexistent/state.pt", 1), ddpkit::Error);
}

TEST_CASE("a truncated or damaged state dict is refused in one sentence", "[state_dict]") {
  const Folder folder;
  const StateDict state = example();
  save_state_dict(folder / "state.pt", state);
  const std::string good = read_file(folder / "state.pt");
  const auto refuse = [&](const std::string& bytes, const std::string& reason) {
    write_file(folder / "bad.pt", bytes);
    try {
      load_state_dict(folder / "bad.pt");
      FAIL("no error");
    } catch (const ddpkit::InvalidArgument& error) {
      CHECK_THAT(error.what(), ContainsSubstring("bad.pt: ") && ContainsSubstring(reason));
      CHECK(std::string(error.what()).find('\n') == std::string::npos);
    }
  };
  for (std::size_t part = 0; part < 20; ++part) refuse(good.substr(0, good.size() * part / 20), "it is");
  for (std::size_t cut = 1; cut < 8; ++cut) refuse(good.substr(0, good.size() - cut), "truncated");
  refuse("hello, this is no archive", "no zip archive");
  CHECK_THROWS_WITH(load_state_dict(folder / "none.pt"), ContainsSubstring("No such file"));
  CHECK_THROWS_WITH(load_state_dict(folder.path()), ContainsSubstring("no regular file"));
  // Each flipped bit is detected or changes nothing.
  std::size_t found = 0;
  for (std::size_t i = 0; i < good.size(); i += 3) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ (1 << (i % 8)));
    write_file(folder / "bad.pt", bad);
    try {
      if (!same(load_state_dict(folder / "bad.pt"), state))
        FAIL("the flipped bit in byte " << i << " has changed a value");
    } catch (const ddpkit::InvalidArgument&) {
      ++found;
    }
  }
  CHECK(found > 100);
  // Flips one bit in a weight.
  const auto& base = state.at("base").to_tensor();
  const std::size_t weight = good.find(std::string(static_cast<const char*>(base.const_data_ptr()), 16));
  REQUIRE(weight != std::string::npos);
  std::string bad = good;
  bad[weight] = static_cast<char>(bad[weight] ^ 1);
  refuse(bad, "the checksum of its record data/0 differs");
}

TEST_CASE("the checksum is zip's", "[state_dict]") {
  const std::string text = "The quick brown fox jumps over the lazy dog";
  CHECK(crc32(text.data(), text.size()) == 0x414fa339U);
  CHECK(crc32(text.data() + 10, text.size() - 10, crc32(text.data(), 10)) == 0x414fa339U);
  CHECK(crc32(nullptr, 0) == 0);
}

TEST_CASE("tensors that are no plain dense ones come back as they were saved", "[state_dict]") {
  const Folder folder;
  torch::manual_seed(3);
  const auto complex = torch::randn({3, 2}, torch::kComplexDouble);
  const auto dense = torch::randn({4, 6}).relu();
  const StateDict state{
      {"conj", complex.conj()},
      {"plain", complex},
      {"view", complex.conj().t()},
      {"neg", torch::imag(complex.conj())},
      {"coo", dense.to_sparse()},
      {"expanded", torch::sparse_coo_tensor(torch::ones({1, 1}, torch::kLong).expand({1, 5}), torch::ones({5}), {3})},
      {"csr", dense.to_sparse_csr()},
      {"csc", dense.to_sparse_csc()},
      {"bsr", dense.to_sparse_bsr({2, 3})},
      {"bsc", dense.to_sparse_bsc({2, 3})},
      {"meta", torch::empty_strided({2, 3}, {1, 2}, torch::TensorOptions(torch::kMeta))}};
  REQUIRE(state.at("conj").to_tensor().is_conj());
  REQUIRE(state.at("neg").to_tensor().is_neg());
  save_state_dict(folder / "state.pt", state);
  const StateValue loaded = load_state_dict(folder / "state.pt");
  for (const auto& [key, value] : state) {
    const at::Tensor &before = value.to_tensor(), &after = loaded.to_dict().at(key).to_tensor();
    CAPTURE(describe(key));
    CHECK(after.layout() == before.layout());
    CHECK(after.is_conj() == before.is_conj());
    CHECK(after.is_neg() == before.is_neg());
    CHECK(after.sizes() == before.sizes());
    if (before.is_meta())
      CHECK(after.strides() == before.strides());
    else
      CHECK(torch::equal(after.to_dense(), before.to_dense()));
  }
  for (const char* name : {"conj", "view"})
    CHECK(loaded.to_dict().at(name).to_tensor().storage().is_alias_of(
        loaded.to_dict().at("plain").to_tensor().storage()));
}

TEST_CASE("a sparse tensor has no more indices than its file", "[state_dict]") {
  // 2^40 indices of one element: _rebuild_sparse_tensor(sparse_coo, (indices, values, (3,), False)).
  const std::string huge = std::string("\x8a\x06", 2) + std::string(5, '\0') + "\1";
  const std::string indices = tensor_pickle(std::string("K\0", 2), huge, std::string("K\0", 2));
  const std::string value = indices.substr(2, indices.size() - 3);
  CHECK_THROWS_WITH(unpickled("\x80\x02"
                              "ctorch._utils\n_rebuild_sparse_tensor\n(ctorch.serialization\n_get_layout\n(X\x10" +
                              std::string(3, '\0') + "torch.sparse_cootR(" + value + value + "K\3\x85\x89ttR."),
                    ContainsSubstring("more indices than its storage"));
}

TEST_CASE("a dict keeps its kind", "[state_dict]") {
  const Folder folder;
  for (const auto kind : {StateDict::Kind::kDict, StateDict::Kind::kOrderedDict, StateDict::Kind::kCounter}) {
    StateDict dict{{5, 1}, {"b", 2}};
    dict.set_kind(kind);
    save_state_dict(folder / "state.pt", dict);
    const StateValue loaded = load_state_dict(folder / "state.pt");
    CHECK(loaded.to_dict().kind() == kind);
    CHECK(same(loaded, dict));
  }
}

TEST_CASE("a pickle is data: what it wants to call is named and not called", "[state_dict]") {
  const auto refuse = [](const std::string& pickle, const char* reason) {
    CHECK_THROWS_WITH(unpickled(pickle), ContainsSubstring(reason));
  };
  using namespace std::string_view_literals;
  // Separate parts of a text: GCC 12 warns about an overflow in a sum of strings.
  constexpr std::string_view kSystem =
      "\x80\x02"
      "cos\nsystem\nX\x04\0\0\0"
      "true\x85R."sv;
  refuse(std::string(kSystem), "wants to call os.system");
  refuse(
      "\x80\x02"
      "cos\nsystem\n.",
      "holds os.system");
  refuse(
      "\x80\x02"
      "ctorch._utils\n_rebuild_qtensor\n)R.",
      "wants to call torch._utils._rebuild_qtensor");
  refuse(
      "\x80\x02"
      "csubprocess\nPopen\n)\x81.",
      "wants to make a subprocess.Popen");
  // Opcodes of other protocols: STACK_GLOBAL, INST, OBJ.
  refuse("\x80\x04N.", "protocol 4");
  refuse("(ios\nsystem\n.", "opcode 0x69");
  refuse("\x80\x02(\x93.", "opcode 0x93");
  refuse(
      "\x80\x02Ncos\nsystem\n\x86"
      "b.",
      "adds to");
}

TEST_CASE("a pickle's numbers are not trusted", "[state_dict]") {
  const auto refuse = [](const std::string& pickle, const char* reason) {
    CHECK_THROWS_WITH(unpickled(pickle), ContainsSubstring(reason));
  };
  const auto tensor = at::Tensor(unpickled(tensor_pickle("K\x04", "K\x06", "K\x02")).to_tensor());
  CHECK(tensor.sizes() == torch::IntArrayRef({6}));
  CHECK(tensor.storage_offset() == 4);
  // 4 + 5 * 2 is the 15th of 16 elements; one more is beyond the end.
  refuse(tensor_pickle("K\x06", "K\x06", "K\x02"), "beyond its storage of 16");
  refuse(tensor_pickle("K\x04", "K\x07", "K\x02"), "beyond its storage of 16");
  refuse(tensor_pickle(kHuge, "K\x06", "K\x02"), "beyond its storage of 16");
  refuse(tensor_pickle(std::string("K\0", 2), kHuge, "K\x02"), "beyond its storage of 16");
  refuse(tensor_pickle(std::string("K\0", 2), "K\x20", kHuge), "beyond its storage of 16");
  refuse(tensor_pickle("J\xff\xff\xff\xff", "K\x06", "K\x02"), "beyond its storage of 16");
  refuse(tensor_pickle("K\x04", "K\x06", "J\xff\xff\xff\xff"), "beyond its storage of 16");
  refuse(tensor_pickle("K\x04", "K\x06", "K\x02", kHuge), "wants 1152921504606846976 elements");
  // A string of 4 GiB - 1 bytes, of which 3 exist.
  refuse(
      "\x80\x02X\xff\xff\xff\xff"
      "abc.",
      "ends in the middle");
  CHECK(unpickled("\x80\x02\x8a\x09" + std::string(9, '\1') + ".").get_if<StateBigInt>()->bytes ==
        std::string(9, '\1'));
  CHECK(unpickled("\x80\x02\x8a\x0c" + std::string(12, '\xff') + ".").to_int() == -1);
  CHECK(unpickled("\x80\x02\x8a\x09" + std::string(8, '\xff') + std::string("\0.", 2))
            .get_if<StateBigInt>()
            ->bytes.size() == 9);
  refuse("\x80\x02N", "ends in the middle");
  refuse("\x80\x02.", "takes a value that is not there");
  refuse("\x80\x02j\xff\xff\xff\xff.", "has not noted");
  refuse("\x80\x02}(Nu.", "key without a value");
  refuse("\x80\x02" + std::string(200, '(') + std::string(200, 't') + ".", "nested deeper than 100");
  // A list that contains itself, and ten lists that each contain the previous list ten times.
  refuse(
      "\x80\x02]q\x01h\x01"
      "a.",
      "nested deeper than 100");
  std::string bomb = "\x80\x02(Nq" + std::string(1, '\0');
  for (char level = 1; level <= 10; ++level) {
    bomb += "](";
    for (int i = 0; i < 10; ++i) bomb += std::string("h") + static_cast<char>(level - 1);
    bomb += std::string("eq") + level;
  }
  refuse(bomb + "t.", "unfolds to many times");
}

TEST_CASE("parameters and buffers have Python's names and order", "[state_dict]") {
  Net net;
  CHECK(names_of(module_state(net)) == std::vector<std::string>{"scale", "first.weight", "first.bias", "norm.weight",
                                                                "norm.bias", "norm.running_mean", "norm.running_var",
                                                                "norm.num_batches_tracked"});
  Net other;
  {
    const torch::NoGradGuard no_grad;
    other.scale.fill_(3);
    other.norm->running_mean.fill_(2);
  }
  const void* place = net.scale.data_ptr();
  load_module_state(net, module_state(other));
  CHECK(net.scale.data_ptr() == place);
  CHECK(net.scale.requires_grad());
  CHECK(torch::equal(net.scale, other.scale));
  CHECK(torch::equal(net.first->weight, other.first->weight));
  CHECK(torch::equal(net.norm->running_mean, other.norm->running_mean));
}

TEST_CASE("a state of another model names what differs and changes nothing", "[state_dict]") {
  Net net;
  const auto before = net.first->weight.clone();
  StateDict state{
      {"first.weight", torch::zeros({4, 3})}, {"first.bias", torch::zeros({5})}, {"more", torch::ones({1})}};
  CHECK_THROWS_WITH(load_module_state(net, state), ContainsSubstring("it lacks scale, norm.weight") &&
                                                       ContainsSubstring("unexpected are more") &&
                                                       ContainsSubstring("first.bias is [5] there and [4] here"));
  CHECK_THROWS_WITH(load_module_state(net, state, {.strict = false}),
                    !ContainsSubstring("lacks") && ContainsSubstring("[5] there"));
  CHECK(torch::equal(net.first->weight, before));
  state["first.bias"] = torch::zeros({4}, torch::kDouble);
  const IncompatibleKeys keys = load_module_state(net, state, {.strict = false});
  CHECK(keys.missing.size() == 6);
  CHECK(keys.unexpected == std::vector<std::string>{"more"});
  CHECK(torch::equal(net.first->weight, torch::zeros({4, 3})));
  CHECK(net.first->bias.dtype() == torch::kFloat);
}
