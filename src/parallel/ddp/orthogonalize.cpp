#include "parallel/ddp/orthogonalize.h"

#include <ATen/ATen.h>

#include <limits>

namespace ddpkit {
namespace {

/// If the first projection leaves no more than this of a column, the rest is rounding errors. They may lie in any
/// direction, also along the columns before.
constexpr double kRoundingErrors = 8;  ///< In epsilons of the type, relative to the column.

double epsilon_of(at::ScalarType type) {
  return type == at::kDouble     ? std::numeric_limits<double>::epsilon()
         : type == at::kFloat    ? std::numeric_limits<float>::epsilon()
         : type == at::kBFloat16 ? 0.0078125
                                 : 0.0009765625;
}

/// The column of `spare` that is nearest to orthogonal to the columns `before`. At least 1 / columns of its squared
/// norm is orthogonal, since fewer columns are before than `spare` has.
at::Tensor choose_spare(const at::Tensor& spare, const at::Tensor& before) {
  if (before.size(2) == 0) return spare.narrow(1, 0, 1);
  const at::Tensor lengths = at::linalg_vector_norm(before.transpose(1, 2).matmul(spare), 2, at::IntArrayRef{1}, true);
  const std::int64_t batch = before.size(0), rows = before.size(1);
  return spare.expand({batch, rows, -1}).gather(2, lengths.argmin(2, /*keepdim=*/true).expand({-1, rows, -1}));
}

/// Projects each column twice, which is enough (Giraud, Langou and Rozložník, 2005). Projects a spare column once: the
/// projection leaves more of it than rounding errors.
void gram_schmidt(const at::Tensor& matrices, double epsilon, const at::Tensor& spare) {
  const double least = kRoundingErrors * epsilon_of(matrices.scalar_type());
  for (std::int64_t i = 0; i < matrices.size(2); ++i) {
    at::Tensor column = matrices.narrow(2, i, 1);
    const at::Tensor before = matrices.narrow(2, 0, i);
    const auto norm_of_column = [&] { return at::linalg_vector_norm(column, 2, at::IntArrayRef{1}, /*keepdim=*/true); };
    const auto project = [&] { column.sub_(before.bmm(before.transpose(1, 2).bmm(column))); };
    at::Tensor norm = norm_of_column(), is_dependent;
    if (i == 0) {
      is_dependent = norm.eq(0);
    } else {
      const at::Tensor limit = norm * least;
      project();
      norm = norm_of_column();
      is_dependent = norm.le(limit);
    }
    at::where_out(column, is_dependent, choose_spare(spare, before), column);
    column.div_(norm.add_(epsilon).masked_fill_(is_dependent, 1));
    if (i == 0) continue;
    project();
    norm = norm_of_column().add_(epsilon);
    column.div_(norm.masked_fill_(norm.eq(0), 1));
  }
}

}  // namespace

void orthogonalize(const at::Tensor& matrices, double epsilon, const at::Tensor& spare) {
  // As in Python: QR knows no half types, and is not worth its calls for one or two columns.
  const bool half = matrices.scalar_type() == at::kHalf || matrices.scalar_type() == at::kBFloat16;
  if (matrices.size(2) <= 2 || half) {
    gram_schmidt(matrices, epsilon, spare);
  } else {
    // QR replaces dependent columns too. For zero columns it takes unit vectors, which can be orthogonal to a sparse
    // gradient.
    const at::Tensor filled = at::where(matrices.eq(0).all(1, /*keepdim=*/true), spare, matrices);
    matrices.copy_(std::get<0>(at::linalg_qr(filled)));
  }
}

}  // namespace ddpkit
