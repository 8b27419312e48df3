#include "comm/backends/shm_sparse.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include <ddpkit/error.h>

#include "comm/backends/shm_arguments.h"
#include "comm/backends/shm_requests.h"

namespace ddpkit {
namespace {

constexpr std::int64_t kMostDimensions = 16;

/// Describes a rank's tensor. Exchanged before the tensors.
struct SparseHeader {
  std::int64_t dtype, sparse_dimensions, dimensions, entries;
  std::array<std::int64_t, kMostDimensions> sizes;

  explicit SparseHeader(const at::Tensor& tensor)
      : dtype(static_cast<std::int64_t>(tensor.scalar_type())),
        sparse_dimensions(tensor.sparse_dim()),
        dimensions(tensor.dim()),
        entries(tensor._nnz()),
        sizes{} {
    std::ranges::copy(tensor.sizes(), sizes.begin());
  }
  bool has_shape_of(const SparseHeader& other) const {
    return dtype == other.dtype && sparse_dimensions == other.sparse_dimensions && dimensions == other.dimensions &&
           sizes == other.sizes;
  }
  std::string text() const {
    return fmt::format("{} of sizes [{}] with {} sparse dimensions", c10::toString(static_cast<at::ScalarType>(dtype)),
                       fmt::join(sizes.begin(), sizes.begin() + dimensions, ", "), sparse_dimensions);
  }
};

/// Stacks the ranks' parts.
at::Tensor gather_parts(shm::Engine& engine, const at::Tensor& part) {
  std::vector<std::int64_t> sizes{engine.world_size()};
  sizes.insert(sizes.end(), part.sizes().begin(), part.sizes().end());
  at::Tensor all = at::empty(sizes, part.options());
  if (part.numel() != 0) engine.run(ShmRequests(engine.rank(), engine.world_size()).dense_all_gather(all, part));
  return all;
}

}  // namespace

void all_reduce_sparse(shm::Engine& engine, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::SUM)
    throw InvalidArgument("all_reduce: of sparse tensors only the sum is defined (ReduceOp.SUM)");
  if (!tensor.is_cpu() || tensor.dim() > kMostDimensions)
    throw InvalidArgument(
        fmt::format("all_reduce: a sparse tensor must be on the CPU and have at most {} dimensions, "
                    "not {} on {}",
                    kMostDimensions, tensor.dim(), tensor.device().str()));
  data_type(tensor);
  const at::NoGradGuard no_grad;
  const at::Tensor own = tensor.detach().coalesce();
  std::vector<SparseHeader> headers(static_cast<std::size_t>(engine.world_size()), SparseHeader(own));
  const SparseHeader header = headers[0];
  engine.run(
      {.kind = shm::CollectiveKind::kAllGather, .input = &header, .output = headers.data(), .numel = sizeof header});
  std::int64_t most = 0;
  for (std::size_t r = 0; r < headers.size(); ++r) {
    if (!headers[r].has_shape_of(headers[0]))
      throw CollectiveMismatch(
          fmt::format("sparse all_reduce: rank 0 has {}, rank {} has {}", headers[0].text(), r, headers[r].text()),
          {.rank = static_cast<int>(r), .call = "all_reduce"});
    most = std::max(most, headers[r].entries);
  }
  const auto padded = [&](const at::Tensor& part) {
    std::vector<std::int64_t> sizes = part.sizes().vec();
    sizes[0] = most;
    at::Tensor result = at::zeros(sizes, part.options());
    result.narrow(0, 0, part.size(0)).copy_(part);
    return result;
  };
  const at::Tensor indices = gather_parts(engine, padded(own.indices().t().contiguous())),
                   values = gather_parts(engine, padded(own.values()));
  at::Tensor sum = at::zeros_like(own);
  for (std::int64_t r = 0; r < engine.world_size(); ++r) {
    const std::int64_t entries = headers[static_cast<std::size_t>(r)].entries;
    sum = sum + at::sparse_coo_tensor(indices[r].narrow(0, 0, entries).t(), values[r].narrow(0, 0, entries),
                                      own.sizes(), own.options());
  }
  at::Tensor result = tensor;
  result.copy_(sum.coalesce());
}

}  // namespace ddpkit
