// Tier 0: the standard library only. The store of a launch.
#pragma once

#include <optional>
#include <string>

#include <ddpkit/launch/launch_options.h>

#include "comm/store/store_key.h"
#include "comm/store/store_server.h"

namespace ddpkit::launcher {

/// Returns the name of the key file, from the options or the environment; empty: none.
std::string key_file_of(const LaunchOptions& options);

/// Serves the store in which the ranks connect, so the store outlives every rank. On one host with a random key, on a
/// free port: MASTER_PORT stays free for programs that serve a separate store, such as Python's. On several hosts
/// with the key file, at the master's address of host 0. Without a key file, rank 0 serves c10d's TCPStore, and host 0
/// prints a warning.
class HostedStore {
 public:
  /// Throws Error or InvalidArgument if the key cannot be read or the store cannot be served.
  HostedStore(const LaunchOptions& options, int port);

  /// Returns the descriptor of the key for the ranks; -1: no key.
  int descriptor() const noexcept { return pass_ ? pass_->get() : -1; }

 private:
  std::optional<store::PassDescriptor> pass_;
  std::optional<store::StoreServer> server_;
};

}  // namespace ddpkit::launcher
