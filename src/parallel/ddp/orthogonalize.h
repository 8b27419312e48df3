// Tier 1.
#pragma once

#include <ATen/core/Tensor.h>

namespace ddpkit {

/// Makes the columns of each matrix orthonormal, in place. [batch][row][column], with no more columns than rows.
/// `epsilon` is added to norms.
///
/// A column that is zero, or that depends on the columns before it, is replaced by a part of `spare`. So a matrix of
/// lower rank also has orthonormal columns. `spare` has random orthonormal columns. [row][column]
void orthogonalize(const at::Tensor& matrices, double epsilon, const at::Tensor& spare);

}  // namespace ddpkit
