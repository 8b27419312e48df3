// What a pickle may call: torch's tensors, made from the storages of the archive.
#include <ATen/ops/empty.h>

#include <fmt/format.h>

#include "pickle_machine.h"
#include "type_names.h"

namespace ddpkit::train::pickle {
namespace {

/// Most dimensions that a tensor is believed to have.
constexpr std::size_t kDimensions = 64;

/// LibTorch allows it for these types.
void require_grad(at::Tensor& tensor) {
  if (tensor.is_floating_point() || tensor.is_complex()) tensor.requires_grad_(true);
}

}  // namespace

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

}  // namespace ddpkit::train::pickle
