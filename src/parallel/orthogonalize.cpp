#include "parallel/orthogonalize.h"

#include <ATen/ATen.h>

namespace ddpkit {
namespace {

/// Twice is enough (Giraud, Langou and Rozložník, 2005): of a column that all but depends on those before it, the first
/// round leaves rounding errors, which may lie in any direction.
constexpr int kRounds = 2;

void gram_schmidt(const at::Tensor& matrices, double epsilon) {
  for (std::int64_t i = 0; i < matrices.size(2); ++i) {
    const at::Tensor column = matrices.narrow(2, i, 1);
    for (int round = 0; round < (i == 0 ? 1 : kRounds); ++round) {
      if (i > 0) {
        const at::Tensor before = matrices.narrow(2, 0, i);
        column.sub_(before.bmm(before.transpose(1, 2).bmm(column)));
      }
      at::Tensor norm = at::linalg_vector_norm(column, 2, at::IntArrayRef{1}, /*keepdim=*/true).add_(epsilon);
      norm.masked_fill_(norm.eq(0), 1);
      column.div_(norm);
    }
  }
}

}  // namespace

void orthogonalize(const at::Tensor& matrices, double epsilon, const at::Tensor& spare) {
  if (spare.defined()) matrices.copy_(at::where(matrices.eq(0).all(1, /*keepdim=*/true), spare, matrices));
  // As in Python: QR knows no half types, and is not worth its calls for one or two columns.
  const bool half = matrices.scalar_type() == at::kHalf || matrices.scalar_type() == at::kBFloat16;
  if (matrices.size(2) <= 2 || half) {
    gram_schmidt(matrices, epsilon);
  } else {
    matrices.copy_(std::get<0>(at::linalg_qr(matrices)));
  }
}

}  // namespace ddpkit
