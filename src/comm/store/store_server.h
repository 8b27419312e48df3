// Tier 0: the standard library only. The server of the keyed store.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "comm/store/wire.h"

namespace ddpkit::store {

/// Serves a store in a thread of this process to the clients that prove that they have the key and belong to the run.
class StoreServer {
 public:
  /// Takes ownership of the listening socket. Throws Error if a descriptor or the thread cannot be created.
  StoreServer(int listener, const Digest& key, const std::string& run, const StoreLimits& limits = {});
  /// Closes all connections.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

 private:
  class Loop;

  std::unique_ptr<Loop> loop_;
  std::thread thread_;
};

}  // namespace ddpkit::store
