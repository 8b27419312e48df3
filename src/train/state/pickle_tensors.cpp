// Creates the tensors of a pickle from the storages of the archive.
#include <ATen/ops/_validate_sparse_compressed_tensor_args.h>
#include <ATen/ops/_validate_sparse_coo_tensor_args.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/sparse_compressed_tensor.h>
#include <ATen/ops/sparse_coo_tensor.h>

#include <fmt/format.h>

#include "train/state/pickle_machine.h"
#include "train/state/type_names.h"

namespace ddpkit::train::pickle {
namespace {

/// Maximum number of dimensions of a tensor.
constexpr std::size_t kDimensions = 64;

c10::ScalarType dtype_in(const Global& global) {
  const std::string_view name = global.name;
  if (const auto dtype = name.starts_with("torch.") ? dtype_of_name(name.substr(6)) : std::nullopt) return *dtype;
  throw BadFile(fmt::format("it has a tensor of the type {}, which is not known here", name));
}

/// LibTorch allows requires_grad for these types.
void require_grad(at::Tensor& tensor) {
  if (tensor.is_floating_point() || tensor.is_complex()) tensor.requires_grad_(true);
}

std::vector<std::int64_t> shape(Node& node) {
  const std::vector<Node*>& items = as<Tuple>(node).items;
  if (items.size() > kDimensions) throw BadFile(fmt::format("it has a tensor of {} dimensions", items.size()));
  std::vector<std::int64_t> numbers;
  for (Node* item : items) numbers.push_back(as<std::int64_t>(*item));
  return numbers;
}

/// (storage, offset, sizes, strides, requires_grad, backward hooks ...)
at::Tensor rebuild(const std::vector<Node*>& arguments, std::optional<c10::ScalarType> dtype) {
  const auto& [storage, type] = as<TypedStorage>(*arguments[0]);
  if (type.has_value() == dtype.has_value()) throw BadFile("it has a tensor whose type is not that of its storage");
  if (!dtype) dtype = type;
  const std::int64_t offset = as<std::int64_t>(*arguments[1]);
  const std::vector<std::int64_t> sizes = shape(*arguments[2]), strides = shape(*arguments[3]);
  // The index after the last element, which must be within the storage.
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
  if (as<bool>(*arguments[4])) require_grad(tensor);
  return tensor;
}

/// Sets whether reads conjugate or negate the elements.
void set_bits(at::Tensor& tensor, Node& bits) {
  if (std::holds_alternative<std::monostate>(bits.value)) return;
  for (const auto& [key, value] : as<Dict>(bits).items) {
    const std::string& name = as<std::string>(*key);
    if (name != "conj" && name != "neg")
      throw BadFile(fmt::format("it has a tensor with the property {}, which is not known here", name));
    if (!as<bool>(*value)) continue;
    name == "conj" ? tensor._set_conj(true) : tensor._set_neg(true);
  }
}

at::Tensor rebuild_sparse(Node& layout_node, const std::vector<Node*>& data) {
  const auto* layout = as<StateValue>(layout_node).get_if<c10::Layout>();
  if (!layout || data.size() < 3 || data.size() > 4)
    throw BadFile("it has a sparse tensor whose parts are not known here");
  const at::Tensor &first = as<at::Tensor>(*data[0]), &second = as<at::Tensor>(*data[1]);
  // LibTorch checks every index. This limits the number of indices to that in the file: strides of 0 could repeat them.
  for (const at::Tensor* part : {&first, *layout == at::kSparse ? &first : &second}) {
    if (static_cast<std::uint64_t>(part->numel()) > part->storage().nbytes() / part->element_size())
      throw BadFile("it has a sparse tensor with more indices than its storage");
  }
  if (*layout == at::kSparse) {
    const std::vector<std::int64_t> sizes = shape(*data[2]);
    std::optional<bool> is_coalesced;
    if (data.size() == 4 && !std::holds_alternative<std::monostate>(data[3]->value)) is_coalesced = as<bool>(*data[3]);
    at::_validate_sparse_coo_tensor_args(first, second, sizes, is_coalesced);
    return at::sparse_coo_tensor(first, second, sizes, second.options().layout(at::kSparse), is_coalesced);
  }
  if (*layout == at::kStrided || data.size() != 4)
    throw BadFile("it has a sparse tensor whose parts are not known here");
  const at::Tensor& values = as<at::Tensor>(*data[2]);
  const std::vector<std::int64_t> sizes = shape(*data[3]);
  at::_validate_sparse_compressed_tensor_args(first, second, values, sizes, *layout);
  return at::sparse_compressed_tensor(first, second, values, sizes, values.options().layout(*layout));
}

}  // namespace

std::optional<at::Tensor> rebuild_tensor(std::string_view function, const std::vector<Node*>& arguments) {
  const std::size_t count = arguments.size();
  at::Tensor tensor;
  if (function == "_rebuild_tensor_v2" && (count == 6 || count == 7)) {
    tensor = rebuild(arguments, std::nullopt);
    if (count == 7) set_bits(tensor, *arguments[6]);
  } else if (function == "_rebuild_tensor_v3" && (count == 7 || count == 8)) {
    tensor = rebuild(arguments, dtype_in(as<Global>(*arguments[6])));
    if (count == 8) set_bits(tensor, *arguments[7]);
  } else if (function == "_rebuild_parameter" && count == 3) {
    tensor = as<at::Tensor>(*arguments[0]).detach();
    if (as<bool>(*arguments[1])) require_grad(tensor);
  } else if (function == "_rebuild_sparse_tensor" && count == 2) {
    tensor = rebuild_sparse(*arguments[0], as<Tuple>(*arguments[1]).items);
  } else if (function == "_rebuild_meta_tensor_no_storage" && count == 4) {
    tensor = at::empty_strided(shape(*arguments[1]), shape(*arguments[2]),
                               at::TensorOptions(dtype_in(as<Global>(*arguments[0]))).device(at::kMeta));
    if (as<bool>(*arguments[3])) require_grad(tensor);
  } else if (function == "_rebuild_device_tensor_from_cpu_tensor" && count == 4) {
    tensor = as<at::Tensor>(*arguments[0]).detach();
    if (tensor.scalar_type() != dtype_in(as<Global>(*arguments[1])))
      throw BadFile("it has a tensor whose type is not that of its elements");
    if (as<bool>(*arguments[3])) require_grad(tensor);
  } else {
    return std::nullopt;
  }
  return tensor;
}

}  // namespace ddpkit::train::pickle
