#include "kernels/optimizer.h"

#include "kernels/variant.h"

namespace ddpkit::optim {

void adam(const AdamArguments& arguments) {
  static const auto function = DDPKIT_CHOOSE_VARIANT(adam);
  function(arguments);
}

void sgd(const SgdArguments& arguments) {
  static const auto function = DDPKIT_CHOOSE_VARIANT(sgd);
  function(arguments);
}

void norm(NormArguments& arguments) {
  static const auto function = DDPKIT_CHOOSE_VARIANT(norm);
  function(arguments);
}

void scale(const ScaleArguments& arguments) {
  static const auto function = DDPKIT_CHOOSE_VARIANT(scale);
  function(arguments);
}

}  // namespace ddpkit::optim
