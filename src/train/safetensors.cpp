#include <ddpkit/train/safetensors.h>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <ddpkit/error.h>
#include <ddpkit/train/atomic_file.h>

#include "train/state/input_file.h"

namespace ddpkit::train {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::uint64_t kLongestHeader = 100'000'000;  // The limit of the reference implementation.
constexpr std::size_t kHeaderStep = 8;
constexpr std::string_view kMetadata = "__metadata__";

/// LibTorch packs two F4 elements into a byte, which is one tensor element.
constexpr at::ScalarType kF4 = at::ScalarType::Float4_e2m1fn_x2;

constexpr std::array<std::pair<std::string_view, at::ScalarType>, 20> kTensorTypes{{
    {"BOOL", at::kBool},
    {"U8", at::kByte},
    {"I8", at::kChar},
    {"I16", at::kShort},
    {"U16", at::kUInt16},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"I32", at::kInt},
    {"U32", at::kUInt32},
    {"F32", at::kFloat},
    {"F64", at::kDouble},
    {"I64", at::kLong},
    {"U64", at::kUInt64},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E5M2", at::kFloat8_e5m2},
    {"F8_E8M0", at::kFloat8_e8m0fnu},
    {"F8_E4M3FNUZ", at::kFloat8_e4m3fnuz},
    {"F8_E5M2FNUZ", at::kFloat8_e5m2fnuz},
    {"F4", kF4},
    {"C64", at::kComplexFloat},
}};

std::string_view tensor_type_name(at::ScalarType dtype) {
  for (const auto& [name, type] : kTensorTypes) {
    if (type == dtype) return name;
  }
  return {};
}

at::ScalarType dtype_of(const std::string& tensor, const std::string& name) {
  for (const auto& [known, type] : kTensorTypes) {
    if (known == name) return type;
  }
  throw BadFile(fmt::format("tensor {} has the type {}, which is not known here", tensor, name));
}

struct Place {
  std::string name;
  at::ScalarType dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t begin, end;  ///< In bytes from the end of the header.
};

std::uint64_t size_in(const Json& value, const std::string& tensor) {
  if (!value.is_number_unsigned()) throw BadFile(fmt::format("the entry of tensor {} is damaged", tensor));
  return value.get<std::uint64_t>();
}

Place place_of(const std::string& name, const Json& entry) {
  const auto damaged = [&] { return BadFile(fmt::format("the entry of tensor {} is damaged", name)); };
  if (!entry.is_object()) throw damaged();
  const auto dtype = entry.find("dtype"), shape = entry.find("shape"), offsets = entry.find("data_offsets");
  if (dtype == entry.end() || shape == entry.end() || offsets == entry.end() || !dtype->is_string() ||
      !shape->is_array() || !offsets->is_array() || offsets->size() != 2)
    throw damaged();
  Place place{
      name, dtype_of(name, dtype->get<std::string>()), {}, size_in((*offsets)[0], name), size_in((*offsets)[1], name)};
  std::uint64_t bytes = c10::elementSize(place.dtype);
  for (const Json& size : *shape) {
    const std::uint64_t length = size_in(size, name);
    if (__builtin_mul_overflow(bytes, length, &bytes) || length > INT64_MAX) throw damaged();
    place.shape.push_back(static_cast<std::int64_t>(length));
  }
  if (place.dtype == kF4) {
    if (place.shape.empty() || place.shape.back() % 2 != 0)
      throw BadFile(fmt::format("tensor {} has half a byte in a row of F4", name));
    place.shape.back() /= 2;
    bytes /= 2;
  }
  if (place.begin > place.end || place.end - place.begin != bytes)
    throw BadFile(
        fmt::format("tensor {} takes {} bytes, but its entry specifies {} to {}", name, bytes, place.begin, place.end));
  return place;
}

std::vector<Place> places_in(const std::string& header) {
  // The format has three levels. Rejects deeper nesting, which would only use memory.
  const auto shallow = [](int depth, Json::parse_event_t, const Json&) {
    if (depth > 3) throw BadFile("its header is nested too deeply");
    return true;
  };
  if (!header.starts_with('{')) throw BadFile("it is no safetensors file: its header is no JSON object");
  Json entries;
  try {
    entries = Json::parse(header, shallow);
  } catch (const Json::exception&) {
    throw BadFile("its header is no JSON");
  }
  std::vector<Place> places;
  for (const auto& [name, entry] : entries.items()) {
    if (name != kMetadata) places.push_back(place_of(name, entry));
  }
  return places;
}

/// Every byte after the header must belong to exactly one tensor.
void check_coverage(const std::vector<Place>& places, std::uint64_t bytes) {
  std::vector<const Place*> sorted;
  for (const Place& place : places) sorted.push_back(&place);
  std::sort(sorted.begin(), sorted.end(),
            [](const Place* a, const Place* b) { return std::tie(a->begin, a->end) < std::tie(b->begin, b->end); });
  std::uint64_t next = 0;
  for (const Place* place : sorted) {
    if (place->begin != next)
      throw BadFile(fmt::format("tensor {} begins at byte {}, where {} was to be", place->name, place->begin, next));
    next = place->end;
  }
  if (next != bytes) throw BadFile(fmt::format("its tensors take {} bytes, and {} are there", next, bytes));
}

}  // namespace

void save_safetensors(const std::filesystem::path& path, const StateDict& tensors) {
  std::vector<std::pair<std::string, at::Tensor>> sorted;
  for (const auto& [key, value] : tensors) {
    const auto* name = std::get_if<std::string>(&key);
    const auto* tensor = value.get_if<at::Tensor>();
    if (!name || !tensor || !tensor->defined())
      throw InvalidArgument(fmt::format("{}: safetensors hold tensors by name, and nothing else", path.string()));
    if (tensor->layout() != at::kStrided || tensor->is_meta() || tensor_type_name(tensor->scalar_type()).empty() ||
        (tensor->scalar_type() == kF4 && tensor->dim() == 0) || *name == kMetadata)
      throw InvalidArgument(fmt::format("{}: {}, a {} tensor, cannot be in a safetensors file", path.string(), *name,
                                        c10::toString(tensor->scalar_type())));
    sorted.emplace_back(*name, tensor->detach());
  }
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    const auto size_a = a.second.element_size(), size_b = b.second.element_size();
    return size_a != size_b ? size_a > size_b : a.first < b.first;
  });
  Json entries = Json::object();
  entries[std::string(kMetadata)] = {{"format", "pt"}};
  std::size_t offset = 0;
  for (const auto& [name, tensor] : sorted) {
    const std::size_t bytes = static_cast<std::size_t>(tensor.numel()) * tensor.element_size();
    std::vector<std::int64_t> shape = tensor.sizes().vec();
    if (tensor.scalar_type() == kF4) shape.back() *= 2;
    entries[name] = {{"dtype", tensor_type_name(tensor.scalar_type())},
                     {"shape", shape},
                     {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string header;
  try {
    header = entries.dump();
  } catch (const Json::exception&) {
    throw InvalidArgument(fmt::format("{}: a tensor's name is not UTF-8", path.string()));
  }
  header.append((kHeaderStep - header.size() % kHeaderStep) % kHeaderStep, ' ');
  AtomicFile file(path);
  const std::uint64_t header_bytes = header.size();
  file.write(&header_bytes, sizeof header_bytes);
  file.write(header.data(), header.size());
  for (const auto& [name, tensor] : sorted) {
    const at::Tensor dense = tensor.cpu().resolve_conj().resolve_neg().contiguous();
    file.write(dense.const_data_ptr(), dense.nbytes());
  }
  file.commit();
}

StateDict load_safetensors(const std::filesystem::path& path) {
  try {
    const InputFile file(path);
    std::uint64_t header_bytes = 0;
    file.read(0, &header_bytes, sizeof header_bytes);
    if (header_bytes > kLongestHeader)
      throw BadFile(fmt::format("its header is of {} bytes, and {} are the most", header_bytes, kLongestHeader));
    const std::vector<Place> places = places_in(file.read(sizeof header_bytes, header_bytes));
    const std::uint64_t data = sizeof header_bytes + header_bytes;
    check_coverage(places, file.size() - data);
    StateDict tensors;
    for (const Place& place : places) {
      const at::Tensor tensor = at::empty(place.shape, at::TensorOptions(place.dtype));
      file.read(data + place.begin, tensor.mutable_data_ptr(), place.end - place.begin);
      tensors[place.name] = tensor;
    }
    return tensors;
  } catch (const BadFile& error) {
    throw InvalidArgument(fmt::format("cannot read the safetensors {}: {}", path.string(), error.what()));
  } catch (const c10::Error&) {
    throw InvalidArgument(
        fmt::format("cannot read the safetensors {}: a tensor has a shape that LibTorch does not take", path.string()));
  }
}

}  // namespace ddpkit::train
