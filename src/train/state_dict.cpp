#include <ddpkit/train/state_dict.h>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>

#include <fmt/format.h>

#include <ddpkit/comm/error.h>
#include <ddpkit/train/atomic_file.h>

#include "archive_writer.h"
#include "state/input_file.h"
#include "state/pickler.h"
#include "state/zip_reader.h"

namespace ddpkit::train {
namespace {

constexpr std::string_view kByteOrder = "little";

std::string_view kind_of(const StateValue& value) {
  constexpr std::string_view kNames[] = {"None",     "a bool", "an int",  "a float", "a str",
                                         "a tensor", "a list", "a tuple", "a dict"};
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
  throw InvalidArgument(
      std::visit([](const auto& name) { return fmt::format("a state dict has no '{}'", name); }, key));
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
