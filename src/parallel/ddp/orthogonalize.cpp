#include "parallel/ddp/orthogonalize.h"

#include <ATen/ATen.h>

#include <limits>

namespace ddpkit {
namespace {

/// Twice is enough (Giraud, Langou and Rozložník, 2005), unless the first round leaves only rounding errors of a
/// column: they may lie in any direction, also along the columns before it. Such a column becomes zero.
constexpr int kRounds = 2;
constexpr double kRoundingErrors = 8;  ///< In epsilons of the type, relative to the column.

double epsilon_of(at::ScalarType type) {
  return type == at::kDouble     ? std::numeric_limits<double>::epsilon()
         : type == at::kFloat    ? std::numeric_limits<float>::epsilon()
         : type == at::kBFloat16 ? 0.0078125
                                 : 0.0009765625;
}

void gram_schmidt(const at::Tensor& matrices, double epsilon) {
  const double least = kRoundingErrors * epsilon_of(matrices.scalar_type());
  const auto norm_of = [](const at::Tensor& column) {
    return at::linalg_vector_norm(column, 2, at::IntArrayRef{1}, /*keepdim=*/true);
  };
  for (std::int64_t i = 0; i < matrices.size(2); ++i) {
    const at::Tensor column = matrices.narrow(2, i, 1);
    for (int round = 0; round < (i == 0 ? 1 : kRounds); ++round) {
      at::Tensor whole;
      if (i > 0) {
        if (round == 0) whole = norm_of(column);
        const at::Tensor before = matrices.narrow(2, 0, i);
        column.sub_(before.bmm(before.transpose(1, 2).bmm(column)));
      }
      at::Tensor norm = norm_of(column);
      if (whole.defined()) column.masked_fill_(norm.le(whole * least), 0);
      norm.add_(epsilon);
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
