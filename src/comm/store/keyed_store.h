// Tier 1: c10d's Store. The client of the keyed store.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/master_address.h"
#include "comm/store/wire.h"

namespace ddpkit::store {

/// Where a store is, and what its clients must prove.
struct StorePlace {
  SocketAddress address{};
  std::string name;  ///< Of the address, for messages.
  Digest key{};
  std::string run;
};

/// A connection to a StoreServer. Any thread may call it; a call that waits delays those of the other threads (clone()
/// makes a further connection). Throws c10::DistNetworkError if the connection is lost, c10::DistStoreError if the time
/// ends or the store refuses the request.
class KeyedStore final : public c10d::Store {
 public:
  /// Connects within `timeout`, which is also the limit of each call. `grace`: additional time for the reply, after
  /// which the connection is lost. `check`: called before each attempt to connect; may throw. Throws RendezvousError if
  /// the store refuses this process or does not prove that it has the key.
  KeyedStore(
      StorePlace place, std::chrono::milliseconds timeout, std::chrono::milliseconds grace = std::chrono::seconds(10),
      const std::function<void()>& check = [] {});
  ~KeyedStore() override;
  KeyedStore(const KeyedStore&) = delete;
  KeyedStore& operator=(const KeyedStore&) = delete;

  c10::intrusive_ptr<Store> clone() override;

  using Store::compareSet;
  using Store::set;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> compareSet(const std::string& key, const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& desired) override;
  std::vector<std::uint8_t> get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  std::int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  /// A timeout of 0 has no limit.
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  /// Returns whether the key exists within `timeout`.
  bool exists_within(const std::string& key, std::chrono::milliseconds timeout);
  void append(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<std::uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }

 private:
  class Socket;

  /// Returns whether the handshake succeeded. Sets `reason` if another attempt may succeed.
  bool join(std::string& reason);
  /// Sends a request and returns the fields of the reply. `waited`: time after which the server replies in any case; by
  /// default the timeout of the store.
  std::string ask(const std::string& request, std::optional<std::chrono::milliseconds> waited = std::nullopt);
  /// The same without an error if the wait timed out.
  std::string exchange(const std::string& request, std::chrono::milliseconds waited);
  std::string ask_and_wait(Operation operation, const std::vector<std::string>& keys,
                           std::chrono::milliseconds timeout);
  void check_size(const std::string& key, std::size_t bytes) const;

  const StorePlace place_;
  const std::chrono::milliseconds grace_;
  std::mutex mutex_;  ///< One request at a time.
  std::unique_ptr<Socket> socket_;
};

}  // namespace ddpkit::store
