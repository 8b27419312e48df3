// Tier 2: c10d's gloo backend. What gloo does not show: its connections, and whether its threads run.
#pragma once

#ifdef DDPKIT_GLOO
#include <memory>
#include <string>
#include <vector>

#define USE_C10D_GLOO  // The header is empty without it.
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <ddpkit/comm/environment.h>

namespace ddpkit {

/// gloo's devices. Each waits for its sockets with one epoll instance, so the sockets are those that it has registered.
class GlooDevices {
 public:
  /// One connection per device: gloo spreads its collectives over them. Throws InvalidArgument if GLOO_SOCKET_IFNAME
  /// names no interface that gloo can use.
  explicit GlooDevices(const LaunchEnvironment& environment);

  const std::vector<std::shared_ptr<gloo::transport::Device>>& list() const noexcept { return devices_; }
  /// Returns the descriptors of the connected sockets.
  std::vector<int> connected() const;

 private:
  std::vector<std::shared_ptr<gloo::transport::Device>> devices_;
  std::vector<int> instances_;
};

/// Returns how often the threads of this process that run gloo's collectives have run, or nothing if one runs now.
std::string runs_of_gloo_threads();

}  // namespace ddpkit
#endif
