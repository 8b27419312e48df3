#include "comm/backends/shm_requests.h"

#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include <ddpkit/error.h>

#include "comm/backends/shm_arguments.h"
#include "tensor/flat_layout.h"

namespace ddpkit {

using shm::CollectiveArgs;
using shm::CollectiveKind;
using shm::Message;

namespace {

/// A part may be within the stacked tensor only at this rank's position, which the call does not change. At another
/// position, the call would overwrite data before reading them.
void check_place(const void* part, std::size_t bytes, const at::Tensor& stacked, int rank, const char* message) {
  const auto* first = static_cast<const std::byte*>(part);
  const auto* begin = static_cast<const std::byte*>(stacked.data_ptr());
  const auto* own = begin + static_cast<std::size_t>(rank) * bytes;
  if (first != own && first < begin + stacked.nbytes() && begin < first + bytes) throw InvalidArgument(message);
}

/// `data`: dense memory like that of `tensor`.
std::shared_ptr<Message> message_of(Message::Kind kind, int peer, int tag, const at::Tensor& tensor, const void* data) {
  auto message = std::make_shared<Message>();
  message->kind = kind;
  message->peer = peer;
  message->tag = tag;
  message->dtype = data_type(tensor);
  message->numel = element_count(tensor);
  message->data = static_cast<std::byte*>(const_cast<void*>(data));
  return message;
}

}  // namespace

void ShmRequests::check_stacked(const at::Tensor& stacked, const at::Tensor& part, const char* call) const {
  check_tensor(stacked, call);
  check_tensor(part, call);
  if (stacked.scalar_type() != part.scalar_type() || stacked.numel() != part.numel() * size_ ||
      !stacked.is_contiguous())
    throw InvalidArgument(fmt::format(
        "{}: the large tensor must be contiguous and hold {} times {} elements of {}, not {} of {}", call, size_,
        part.numel(), c10::toString(part.scalar_type()), stacked.numel(), c10::toString(stacked.scalar_type())));
}

void ShmRequests::check_message(int peer, int tag, const char* call) const {
  if (peer != shm::kAnySource) check_root(peer, size_, call);
  if (peer == rank_) throw InvalidArgument(fmt::format("{}: rank {} cannot exchange messages with itself", call, peer));
  if (tag < 0) throw InvalidArgument(fmt::format("{}: the tag is {}, but must not be negative", call, tag));
}

CollectiveArgs ShmRequests::all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op) const {
  Operands operands("all_reduce");
  const void* input = operands.input(contribution(op, tensor));
  void* output = operands.output(tensor);
  CollectiveArgs request{.kind = CollectiveKind::kAllReduce,
                         .dtype = data_type(tensor),
                         .op = reduction(op, tensor, "all_reduce"),
                         .input = input,
                         .output = output,
                         .numel = element_count(tensor)};
  operands.attach_to(request);
  return request;
}

CollectiveArgs ShmRequests::dense_all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op) const {
  return {.kind = CollectiveKind::kAllReduce,
          .dtype = data_type(tensor),
          .op = reduction(op, tensor, "all_reduce"),
          .input = tensor.data_ptr(),
          .output = tensor.data_ptr(),
          .numel = element_count(tensor)};
}

CollectiveArgs ShmRequests::reduce(const at::Tensor& tensor, std::int64_t root, const c10d::ReduceOp& op) const {
  check_root(root, size_, "reduce");
  Operands operands("reduce");
  const void* input = operands.input(contribution(op, tensor));
  const bool is_root = root == rank_;
  CollectiveArgs request{.kind = CollectiveKind::kReduce,
                         .dtype = data_type(tensor),
                         .op = reduction(op, tensor, "reduce"),
                         .root = static_cast<int>(root),
                         .input = input,
                         .output = is_root ? operands.output(tensor) : nullptr,
                         .numel = element_count(tensor)};
  operands.attach_to(request);
  return request;
}

CollectiveArgs ShmRequests::broadcast(const at::Tensor& tensor, std::int64_t root) const {
  check_root(root, size_, "broadcast");
  Operands operands("broadcast");
  CollectiveArgs request{.kind = CollectiveKind::kBroadcast,
                         .dtype = data_type(tensor),
                         .root = static_cast<int>(root),
                         .numel = element_count(tensor)};
  if (root == rank_) {
    request.input = operands.input(tensor.contiguous());
    request.output = const_cast<void*>(request.input);
  } else {
    request.output = operands.output(tensor);
  }
  operands.attach_to(request);
  return request;
}

CollectiveArgs ShmRequests::dense_broadcast(const at::Tensor& tensor, int root) const {
  check_root(root, size_, "broadcast");
  return {.kind = CollectiveKind::kBroadcast,
          .dtype = data_type(tensor),
          .root = root,
          .input = tensor.data_ptr(),
          .output = tensor.data_ptr(),
          .numel = element_count(tensor)};
}

CollectiveArgs ShmRequests::all_gather(const Tensors& outputs, const at::Tensor& input, const char* call) const {
  check_list(outputs, size_, input, call);
  Operands operands("all_gather");
  CollectiveArgs request{.kind = CollectiveKind::kAllGather,
                         .dtype = data_type(input),
                         .input = operands.input(input.contiguous()),
                         .numel = element_count(input)};
  for (const at::Tensor& output : outputs) request.outputs.push_back(operands.output(output));
  operands.attach_to(request);
  return request;
}

CollectiveArgs ShmRequests::all_gather(const at::Tensor& output, const at::Tensor& input) const {
  check_stacked(output, input, "all_gather");
  const at::Tensor dense = input.contiguous();
  CollectiveArgs request = dense_all_gather(output, dense);
  Operands operands("all_gather");
  operands.input(dense);
  operands.output(output);
  operands.attach_to(request);
  return request;
}

CollectiveArgs ShmRequests::dense_all_gather(const at::Tensor& output, const at::Tensor& input) const {
  check_place(input.data_ptr(), input.nbytes(), output, rank_,
              "all_gather: the input may lie within the output only where this rank's part goes");
  return {.kind = CollectiveKind::kAllGather,
          .dtype = data_type(input),
          .input = input.data_ptr(),
          .output = output.data_ptr(),
          .numel = element_count(input)};
}

CollectiveArgs ShmRequests::gather(const std::vector<Tensors>& outputs, const at::Tensor& input,
                                   std::int64_t root) const {
  check_root(root, size_, "gather");
  const bool is_root = root == rank_;
  if (outputs.size() != (is_root ? 1u : 0u))
    throw InvalidArgument(is_root ? "gather: the root needs one list of outputs" : "gather: only the root has outputs");
  if (is_root) check_list(outputs[0], size_, input, "gather");
  Operands operands("gather");
  CollectiveArgs request{.kind = CollectiveKind::kGather,
                         .dtype = data_type(input),
                         .root = static_cast<int>(root),
                         .input = operands.input(input.contiguous()),
                         .numel = element_count(input)};
  for (const at::Tensor& target : is_root ? outputs[0] : Tensors{}) request.outputs.push_back(operands.output(target));
  operands.attach_to(request);
  return request;
}

CollectiveArgs ShmRequests::scatter(const at::Tensor& output, const std::vector<Tensors>& inputs,
                                    std::int64_t root) const {
  check_root(root, size_, "scatter");
  const bool is_root = root == rank_;
  if (inputs.size() != (is_root ? 1u : 0u))
    throw InvalidArgument(is_root ? "scatter: the root needs one list of inputs" : "scatter: only the root has inputs");
  if (is_root) check_list(inputs[0], size_, output, "scatter");
  Operands operands("scatter");
  CollectiveArgs request{.kind = CollectiveKind::kScatter,
                         .dtype = data_type(output),
                         .root = static_cast<int>(root),
                         .output = operands.output(output),
                         .numel = element_count(output)};
  for (const at::Tensor& input : is_root ? inputs[0] : Tensors{})
    request.inputs.push_back(operands.input(input.contiguous()));
  operands.attach_to(request);
  return request;
}

CollectiveArgs ShmRequests::reduce_scatter(const at::Tensor& output, const Tensors& inputs,
                                           const c10d::ReduceOp& op) const {
  check_list(inputs, size_, output, "reduce_scatter");
  Operands operands("reduce_scatter");
  CollectiveArgs request{.kind = CollectiveKind::kReduceScatter,
                         .dtype = data_type(output),
                         .op = reduction(op, output, "reduce_scatter"),
                         .output = operands.output(output),
                         .numel = element_count(output)};
  for (const at::Tensor& input : inputs) request.inputs.push_back(operands.input(contribution(op, input)));
  operands.attach_to(request);
  return request;
}

CollectiveArgs ShmRequests::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                           const c10d::ReduceOp& op) const {
  check_stacked(input, output, "reduce_scatter");
  const at::Tensor dense = contribution(op, input);
  Operands operands("reduce_scatter");
  operands.input(dense);
  CollectiveArgs request = dense_reduce_scatter(output, operands.output(output), dense, op);
  operands.attach_to(request);
  return request;
}

CollectiveArgs ShmRequests::dense_reduce_scatter(const at::Tensor& output, void* dense_output, const at::Tensor& input,
                                                 const c10d::ReduceOp& op) const {
  check_place(dense_output, output.nbytes(), input, rank_,
              "reduce_scatter: the output may lie within the input only where this rank's part is");
  return {.kind = CollectiveKind::kReduceScatter,
          .dtype = data_type(output),
          .op = reduction(op, output, "reduce_scatter"),
          .input = input.data_ptr(),
          .output = dense_output,
          .numel = element_count(output)};
}

CollectiveArgs ShmRequests::all_to_all(const Tensors& outputs, const Tensors& inputs) const {
  if (inputs.size() != static_cast<std::size_t>(size_) || outputs.size() != static_cast<std::size_t>(size_))
    throw InvalidArgument(
        fmt::format("all_to_all: {} inputs and {} outputs for {} ranks", inputs.size(), outputs.size(), size_));
  CollectiveArgs request{.kind = CollectiveKind::kAllToAll, .dtype = data_type(inputs[0])};
  Operands operands("all_to_all");
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    check_tensor(inputs[r], "all_to_all");
    check_tensor(outputs[r], "all_to_all");
    if (inputs[r].scalar_type() != inputs[0].scalar_type() || outputs[r].scalar_type() != inputs[0].scalar_type())
      throw InvalidArgument("all_to_all: all tensors must have one type");
    request.inputs.push_back(operands.input(inputs[r].contiguous()));
    request.outputs.push_back(operands.output(outputs[r]));
    request.send_numel.push_back(element_count(inputs[r]));
    request.receive_numel.push_back(element_count(outputs[r]));
  }
  const auto own = static_cast<std::size_t>(rank_);
  if (request.send_numel[own] != request.receive_numel[own])
    throw InvalidArgument(fmt::format("all_to_all: rank {} keeps {} elements for itself, but has room for {}", rank_,
                                      request.send_numel[own], request.receive_numel[own]));
  request.numel = *std::max_element(request.send_numel.begin(), request.send_numel.end());
  operands.attach_to(request);
  return request;
}

ShmRequests::Tensors ShmRequests::split(const at::Tensor& tensor, std::vector<std::int64_t> sizes,
                                        const char* name) const {
  check_tensor(tensor, "all_to_all");
  if (tensor.dim() == 0) throw InvalidArgument("all_to_all: a scalar cannot be split");
  if (!tensor.is_contiguous()) throw InvalidArgument(fmt::format("all_to_all: the {} must be contiguous", name));
  const int64_t length = tensor.size(0);
  if (sizes.empty()) {
    if (length % size_ != 0)
      throw InvalidArgument(
          fmt::format("all_to_all: {} rows of the {} do not divide evenly over {} ranks", length, name, size_));
    sizes.assign(static_cast<std::size_t>(size_), length / size_);
  }
  const bool fits = sizes.size() == static_cast<std::size_t>(size_) &&
                    std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size >= 0; }) &&
                    std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == length;
  if (!fits)
    throw InvalidArgument(
        fmt::format("all_to_all: the {} splits must be {} numbers that add up to its {} rows", name, size_, length));
  return tensor.detach().split_with_sizes(sizes);
}

std::vector<CollectiveArgs> ShmRequests::coalesced(const Tensors& tensors, const at::Tensor& shard,
                                                   const c10d::ReduceOp& op) const {
  const bool scatters = shard.defined();
  const char* call = scatters ? "reduce_scatter_coalesced" : "all_reduce_coalesced";
  const at::Tensor& like = scatters || tensors.empty() ? shard : tensors[0];
  check_tensor(like, call);
  const auto size = static_cast<std::int64_t>(size_of(data_type(like)));
  FlatLayout layout;
  if (scatters) {
    std::vector<std::int64_t> numels;
    for (const at::Tensor& tensor : tensors) numels.push_back(static_cast<std::int64_t>(element_count(tensor)));
    layout = make_flat_layout(std::move(numels), static_cast<std::size_t>(size), size_);
    if (!shard.is_contiguous() || static_cast<std::int64_t>(element_count(shard)) != layout.shard_numel)
      throw InvalidArgument(fmt::format("{}: the shard must be dense and have {} bytes, but it has {}", call,
                                        layout.shard_numel * size, shard.nbytes()));
  }
  std::vector<CollectiveArgs> requests;
  for (std::size_t begin = 0; begin < tensors.size(); begin += shm::kMaxCoalesced) {
    const std::size_t end = std::min(tensors.size(), begin + shm::kMaxCoalesced);
    CollectiveArgs request{
        .kind = scatters ? CollectiveKind::kReduceScatterCoalesced : CollectiveKind::kAllReduceCoalesced,
        .dtype = data_type(like),
        .op = reduction(op, like, call)};
    Operands operands(call);
    operands.input(like);
    for (std::size_t i = begin; i < end; ++i) {
      const at::Tensor& tensor = tensors[i];
      check_tensor(tensor, call);
      operands.input(tensor);
      if (!tensor.is_non_overlapping_and_dense() || tensor.scalar_type() != like.scalar_type())
        throw InvalidArgument(fmt::format("{}: the tensors must be dense and of one type", call));
      shm::CoalescedTensor& piece = request.tensors.emplace_back();
      piece.data = tensor.data_ptr();
      piece.numel = element_count(tensor);
      request.numel += piece.numel;
      if (!scatters) continue;
      const FlatLayout::Range range = layout.range(i, rank_);
      piece.begin = static_cast<std::size_t>(range.in_tensor);
      piece.count = static_cast<std::size_t>(range.count);
      piece.output = static_cast<std::byte*>(shard.data_ptr()) + range.in_shard * size;
    }
    operands.attach_to(request);
    requests.push_back(std::move(request));
  }
  return requests;
}

shm::MessageHandle ShmRequests::send(const at::Tensor& tensor, int destination, int tag) const {
  check_message(destination, tag, "send");
  Operands operands("send");
  const at::Tensor dense = tensor.contiguous();
  auto message = message_of(Message::Kind::kSend, destination, tag, dense, operands.input(dense));
  operands.attach_to(*message);
  return message;
}

shm::MessageHandle ShmRequests::receive(const at::Tensor& tensor, int source, int tag) const {
  check_message(source, tag, "recv");
  Operands operands("recv");
  auto message = message_of(Message::Kind::kReceive, source, tag, tensor, operands.output(tensor));
  operands.attach_to(*message);
  return message;
}

}  // namespace ddpkit
