#include "kernels/reduce.h"

namespace ddpkit::kernels {

bool supports(DataType dtype, Reduction op) {
  const bool bitwise = op == Reduction::kBand || op == Reduction::kBor || op == Reduction::kBxor;
  switch (dtype) {
    case DataType::kFloat16:
    case DataType::kBFloat16:
    case DataType::kFloat32:
    case DataType::kFloat64:
      return !bitwise;
    case DataType::kBool:
      return op != Reduction::kAvg;
    default:
      return true;
  }
}

DDPKIT_DEFINE_KERNEL(reduce, const ReduceArguments)

}  // namespace ddpkit::kernels
