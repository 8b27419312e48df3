#include "kernels/optimizer_impl.h"

namespace ddpkit::optim {

void adam_baseline(const AdamArguments& arguments) { adam_any(arguments); }
void sgd_baseline(const SgdArguments& arguments) { sgd_any(arguments); }
void norm_baseline(NormArguments& arguments) { norm_any(arguments); }
void scale_baseline(const ScaleArguments& arguments) { scale_any(arguments); }

}  // namespace ddpkit::optim
