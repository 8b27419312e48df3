#include <ddpkit/error.h>

#include "comm/backends.h"

namespace ddpkit {

c10::intrusive_ptr<c10d::Backend> create_gloo_backend(const c10::intrusive_ptr<c10d::Store>&, const LaunchEnvironment&,
                                                      std::chrono::milliseconds) {
  throw InvalidArgument(
      "this build of ddpkit has no gloo backend: install gloo's headers (Debian and Ubuntu: libgloo-dev) and configure "
      "with -DDDPKIT_GLOO=ON");
}

}  // namespace ddpkit
