#include "comm/device_reduce.h"

namespace ddpkit {

bool reduce_over_devices(const std::vector<at::Tensor>&, const std::vector<c10::Stream>&) { return false; }

}  // namespace ddpkit
