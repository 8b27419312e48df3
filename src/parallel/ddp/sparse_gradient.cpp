#include "parallel/ddp/sparse_gradient.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace ddpkit {

at::Tensor average_sparse(const at::Tensor& gradient, const at::Tensor& parameter, const ProcessGroup& group) {
  const at::NoGradGuard no_grad;
  const auto long_options = at::TensorOptions(at::kLong).device(parameter.device());
  const auto value_options = parameter.options().requires_grad(false);
  const at::Tensor local = gradient.defined() ? gradient.coalesce() : at::Tensor();
  // Only the first dimension is sparse: rows of an embedding.
  const std::int64_t count = local.defined() ? local._nnz() : 0;
  const at::Tensor counts = group.all_gather(at::full({1}, count, long_options)).view({-1}).cpu();
  group.check();
  const std::int64_t most = counts.max().item<std::int64_t>();
  std::vector<std::int64_t> sizes = parameter.sizes().vec();
  sizes[0] = most;
  const at::Tensor rows = at::zeros({most}, long_options);
  const at::Tensor values = at::zeros(sizes, value_options);
  if (count != 0) {
    rows.narrow(0, 0, count).copy_(local.indices()[0]);
    values.narrow(0, 0, count).copy_(local.values());
  }
  const at::Tensor all_rows = group.all_gather(rows);
  const at::Tensor all_values = group.all_gather(values);
  std::vector<at::Tensor> row_parts;
  std::vector<at::Tensor> value_parts;
  for (int r = 0; r < group.world_size(); ++r) {
    const std::int64_t theirs = counts[r].item<std::int64_t>();
    row_parts.push_back(all_rows[r].narrow(0, 0, theirs));
    value_parts.push_back(all_values[r].narrow(0, 0, theirs));
  }
  // Coalescing adds entries of one row in rank order, so results are bitwise equal on all ranks.
  return at::sparse_coo_tensor(at::cat(row_parts).unsqueeze(0), at::cat(value_parts).div_(group.world_size()),
                               parameter.sizes(), value_options.layout(at::kSparse))
      .coalesce();
}

}  // namespace ddpkit
