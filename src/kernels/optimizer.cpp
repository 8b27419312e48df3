#include "kernels/optimizer.h"

namespace ddpkit::kernels {

DDPKIT_DEFINE_KERNEL(adam, const AdamArguments)
DDPKIT_DEFINE_KERNEL(sgd, const SgdArguments)
DDPKIT_DEFINE_KERNEL(norm, NormArguments)
DDPKIT_DEFINE_KERNEL(scale, const ScaleArguments)

}  // namespace ddpkit::kernels
