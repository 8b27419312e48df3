#include "kernels/optimizer_impl.h"

namespace ddpkit::optim {

void adam_avx2(const AdamArguments& arguments) { adam_any(arguments); }
void sgd_avx2(const SgdArguments& arguments) { sgd_any(arguments); }
void norm_avx2(NormArguments& arguments) { norm_any(arguments); }
void scale_avx2(const ScaleArguments& arguments) { scale_any(arguments); }

}  // namespace ddpkit::optim
