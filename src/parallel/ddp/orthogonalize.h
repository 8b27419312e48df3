// Tier 1.
#pragma once

#include <ATen/core/Tensor.h>

namespace ddpkit {

/// Makes the columns of each matrix orthonormal, in place; `epsilon` is added to norms. [batch][row][column], with no
/// more columns than rows. Zero columns stay zero, unless there is a `spare` to take their place: [row][column].
void orthogonalize(const at::Tensor& matrices, double epsilon, const at::Tensor& spare = {});

}  // namespace ddpkit
