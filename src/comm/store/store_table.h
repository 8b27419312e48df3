// Tier 0: the standard library only. The keys and values of a store, and the requests about them.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "comm/store/wire.h"

namespace ddpkit::store {

/// A request that waits for keys.
struct PendingRequest {
  using Clock = std::chrono::steady_clock;

  std::vector<std::string> keys;
  bool wants_values = false;
  Clock::time_point deadline{};
  std::size_t first_missing = 0;  ///< The keys before this one have been there.
};

/// Not thread-safe.
class StoreTable {
 public:
  explicit StoreTable(const StoreLimits& limits) : limits_(limits) {}

  /// Returns the reply. Returns none if the request must wait; `pending` then describes it. Throws InvalidArgument if
  /// the request is malformed.
  std::optional<std::string> answer(std::string_view request, PendingRequest& pending);
  /// Returns the reply if all keys exist.
  std::optional<std::string> answer_pending(PendingRequest& pending) const;
  /// Returns the reply after the deadline.
  std::string answer_late(const PendingRequest& pending) const;
  /// Returns a number that increases when a value is stored.
  std::uint64_t changes() const { return changes_; }

 private:
  using Values = std::unordered_map<std::string, std::string>;

  std::string set_all(Reader& fields);
  std::string compare_set(Reader& fields);
  std::string add(Reader& fields);
  std::string append(Reader& fields);
  std::string remove(Reader& fields);
  std::optional<std::string> get(Reader& fields, bool wants_values, PendingRequest& pending);
  /// Returns the refusal if the value is too long or the store is full. Otherwise stores the value, and returns none.
  std::optional<std::string> put(std::string_view key, std::string value);

  StoreLimits limits_;
  Values values_;
  std::uint64_t changes_ = 0;
  std::size_t bytes_ = 0;  ///< Of all keys and values, with an allowance for each entry.
};

}  // namespace ddpkit::store
