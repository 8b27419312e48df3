#include "kernels/optimizer_impl.h"

namespace ddpkit::optim {

void adam_avx512(const AdamArguments& arguments) { adam_any(arguments); }
void sgd_avx512(const SgdArguments& arguments) { sgd_any(arguments); }
void norm_avx512(NormArguments& arguments) { norm_any(arguments); }
void scale_avx512(const ScaleArguments& arguments) { scale_any(arguments); }

}  // namespace ddpkit::optim
