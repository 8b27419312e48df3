#include <ddpkit/train/state_dict.h>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>

#include <iterator>
#include <memory>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/train/atomic_file.h>

#include "train/archive_writer.h"
#include "train/state/input_file.h"
#include "train/state/pickler.h"
#include "train/state/zip_reader.h"

namespace ddpkit::train {
namespace {

constexpr std::string_view kByteOrder = "little";

std::string_view kind_of(const StateValue& value) {
  constexpr std::string_view kNames[] = {"None",    "a bool",   "an int",   "a float",
                                         "a str",   "a tensor", "a list",   "a tuple",
                                         "a dict",  "a set",    "a bytes",  "an int of more than 64 bits",
                                         "complex", "a dtype",  "a device", "a layout"};
  static_assert(std::size(kNames) == std::variant_size_v<StateValue::Variant>);
  return kNames[value.variant().index()];
}

template <class T>
const T& get(const StateValue& value, std::string_view wanted) {
  if (const T* held = value.get_if<T>()) return *held;
  throw InvalidArgument(fmt::format("a state dict has {} where {} is needed", kind_of(value), wanted));
}

}  // namespace

StateDict::StateDict() = default;
StateDict::StateDict(const StateDict& other) = default;
StateDict::StateDict(StateDict&& other) noexcept = default;
StateDict& StateDict::operator=(const StateDict& other) = default;
StateDict& StateDict::operator=(StateDict&& other) noexcept = default;
StateDict::~StateDict() = default;

StateDict::StateDict(std::initializer_list<StateItem> items) {
  for (const StateItem& item : items) (*this)[item.key] = item.value;
}

StateValue& StateDict::operator[](const StateKey& key) {
  const auto [place, added] = index_.try_emplace(key, items_.size());
  if (added) items_.push_back({key, {}});
  return items_[place->second].value;
}

const StateValue* StateDict::find(const StateKey& key) const {
  const auto found = index_.find(key);
  return found == index_.end() ? nullptr : &items_[found->second].value;
}

const StateValue& StateDict::at(const StateKey& key) const {
  if (const StateValue* value = find(key)) return *value;
  throw InvalidArgument(fmt::format("a state dict has no '{}'", describe(key)));
}

OtherStateKey::OtherStateKey(const StateValue& value) : value_(std::make_shared<StateValue>(value)) {
  const auto check = [](const StateValue& part, const auto& check_part) -> void {
    const auto* bytes = part.get_if<StateBytes>();
    if (part.get_if<at::Tensor>() || part.get_if<StateList>() || part.get_if<StateDict>() || part.get_if<StateSet>() ||
        (bytes && bytes->is_bytearray))
      throw InvalidArgument(fmt::format("{} cannot be a key of a state dict", kind_of(part)));
    if (const auto* tuple = part.get_if<StateTuple>()) {
      for (const StateValue& item : tuple->items) check_part(item, check_part);
    }
  };
  check(value, check);
  pickle_ = Pickler(value).pickle();
}

std::string describe(const StateKey& key) {
  if (const auto* number = std::get_if<std::int64_t>(&key)) return std::to_string(*number);
  if (const auto* text = std::get_if<std::string>(&key)) return *text;
  return std::string(kind_of(std::get<OtherStateKey>(key).value()));
}

bool StateValue::to_bool() const { return get<bool>(*this, "a bool"); }
std::int64_t StateValue::to_int() const { return get<std::int64_t>(*this, "an int"); }
double StateValue::to_double() const {
  if (const auto* integer = get_if<std::int64_t>()) return static_cast<double>(*integer);
  return get<double>(*this, "a number");
}
const std::string& StateValue::to_string() const { return get<std::string>(*this, "a str"); }
const at::Tensor& StateValue::to_tensor() const { return get<at::Tensor>(*this, "a tensor"); }
const StateDict& StateValue::to_dict() const { return get<StateDict>(*this, "a dict"); }
const std::vector<StateValue>& StateValue::to_items() const {
  if (const auto* list = get_if<StateList>()) return *list;
  return get<StateTuple>(*this, "a list or a tuple").items;
}

void save_state_dict(const std::filesystem::path& path, const StateValue& value) {
  const Pickler pickler(value);
  AtomicFile file(path);
  ArchiveWriter writer([&](const void* data, std::size_t bytes) { file.write(data, bytes); });
  caffe2::serialize::PyTorchStreamWriter archive(
      [&](const void* data, std::size_t bytes) { return writer.write(data, bytes); });
  archive.writeRecord("data.pkl", pickler.pickle().data(), pickler.pickle().size());
  archive.writeRecord("byteorder", kByteOrder.data(), kByteOrder.size());
  for (std::size_t i = 0; i < pickler.storages().size(); ++i) {
    const at::Tensor& bytes = pickler.storages()[i];
    archive.writeRecord(fmt::format("data/{}", i), bytes.const_data_ptr(), bytes.nbytes());
  }
  archive.writeEndOfFile();
  writer.finish();
  file.commit();
}

StateValue load_state_dict(const std::filesystem::path& path) {
  try {
    const ZipReader archive(path);
    if (archive.has("byteorder") && archive.read("byteorder") != kByteOrder)
      throw BadFile("its numbers are not little-endian");
    return unpickle(archive.read("data.pkl"), [&](const std::string& key) {
      const std::string record = "data/" + key;
      const at::Tensor bytes = at::empty({static_cast<std::int64_t>(archive.size_of(record))}, at::kByte);
      archive.read(record, bytes.mutable_data_ptr());
      return bytes.storage();
    });
  } catch (const BadFile& error) {
    throw InvalidArgument(fmt::format("cannot read the state dict {}: {}", path.string(), error.what()));
  } catch (const c10::Error& error) {
    throw InvalidArgument(
        fmt::format("cannot read the state dict {}: {}", path.string(), error.what_without_backtrace()));
  }
}

}  // namespace ddpkit::train
