#include <ddpkit/train/main.h>

#include "har/libtorch_parallel.h"

namespace har {

std::unique_ptr<Devices> make_libtorch_parallel(std::shared_ptr<Classifier>, const std::vector<c10::Device>&) {
  throw ddpkit::train::UsageError("--multi-gpu libtorch-dp needs a build with CUDA: script/build cuda");
}

}  // namespace har
