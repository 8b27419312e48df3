// Collectives of one tensor of any shape that holds a part for each rank.
#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/backends/shm_arguments.h"
#include "comm/backends/shm_backend.h"

namespace ddpkit {

using shm::CollectiveKind;
using shm::Request;

namespace {

/// Returns the addresses of the parts. Creating tensors would take longer than a small collective.
template <class Pointer>
std::vector<Pointer> parts_of(const at::Tensor& stacked, int ranks) {
  const std::size_t bytes = stacked.nbytes() / static_cast<std::size_t>(ranks);
  std::vector<Pointer> parts(static_cast<std::size_t>(ranks));
  for (std::size_t r = 0; r < parts.size(); ++r) parts[r] = static_cast<std::byte*>(stacked.data_ptr()) + r * bytes;
  return parts;
}

/// A part may be within the stacked tensor only at this rank's position, which the call does not change. At another
/// position, the call would overwrite data before reading them.
void check_place(const at::Tensor& part, const at::Tensor& stacked, const void* own, const char* message) {
  const auto* first = static_cast<const std::byte*>(part.data_ptr());
  const auto* begin = static_cast<const std::byte*>(stacked.data_ptr());
  if (first != own && first < begin + stacked.nbytes() && begin < first + part.nbytes()) throw InvalidArgument(message);
}

}  // namespace

void ShmBackend::check_stacked(const at::Tensor& stacked, const at::Tensor& part, const char* call) const {
  check_tensor(stacked, call);
  check_tensor(part, call);
  if (stacked.scalar_type() != part.scalar_type() || stacked.numel() != part.numel() * size_ ||
      !stacked.is_contiguous())
    throw InvalidArgument(fmt::format(
        "{}: the large tensor must be contiguous and hold {} times {} elements of {}, not {} of {}", call, size_,
        part.numel(), c10::toString(part.scalar_type()), stacked.numel(), c10::toString(stacked.scalar_type())));
}

Request ShmBackend::dense_all_gather_request(const at::Tensor& output, const at::Tensor& input) const {
  auto outputs = parts_of<void*>(output, size_);
  check_place(input, output, outputs[static_cast<std::size_t>(rank_)],
              "all_gather: the input may lie within the output only where this rank's part goes");
  return {.kind = CollectiveKind::kAllGather,
          .dtype = data_type(input),
          .input = input.data_ptr(),
          .numel = element_count(input),
          .outputs = std::move(outputs)};
}

Request ShmBackend::dense_reduce_scatter_request(const at::Tensor& output, const at::Tensor& input,
                                                 const c10d::ReduceOp& op) const {
  auto inputs = parts_of<const void*>(input, size_);
  check_place(output, input, inputs[static_cast<std::size_t>(rank_)],
              "reduce_scatter: the output may lie within the input only where this rank's part is");
  return {.kind = CollectiveKind::kReduceScatter,
          .dtype = data_type(output),
          .op = reduction(op, output, "reduce_scatter"),
          .output = output.data_ptr(),
          .numel = element_count(output),
          .inputs = std::move(inputs)};
}

}  // namespace ddpkit
