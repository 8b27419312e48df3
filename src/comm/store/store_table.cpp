#include "comm/store/store_table.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/parse_number.h>

#include "comm/timeout.h"

namespace ddpkit::store {
namespace {

/// Memory of an entry besides its bytes.
constexpr std::size_t kEntryBytes = 128;

std::string refuse(const std::string& reason) { return Writer(Status::kRefused).text(reason).finish(); }
std::string ok() { return Writer(Status::kOk).finish(); }

void require(const Reader& fields) {
  if (!fields.ok()) throw InvalidArgument("a request to the store is malformed");
}

}  // namespace

std::optional<std::string> StoreTable::answer(std::string_view request, PendingRequest& pending) {
  Reader fields(request);
  const auto operation = static_cast<Operation>(fields.code());
  switch (operation) {
    case Operation::kSet:
      return set_all(fields);
    case Operation::kCompareSet:
      return compare_set(fields);
    case Operation::kAdd:
      return add(fields);
    case Operation::kAppend:
      return append(fields);
    case Operation::kDelete:
      return remove(fields);
    case Operation::kGet:
    case Operation::kWait:
      return get(fields, operation == Operation::kGet, pending);
    case Operation::kCheck: {
      const std::vector<std::string> keys = fields.texts();
      require(fields);
      bool all = true;
      for (const std::string& key : keys) all = all && values_.contains(key);
      return Writer(Status::kOk).number(all).finish();
    }
    case Operation::kCount:
      require(fields);
      return Writer(Status::kOk).number(static_cast<std::int64_t>(values_.size())).finish();
  }
  throw InvalidArgument("a request to the store has an unknown operation");
}

std::optional<std::string> StoreTable::put(std::string_view key, std::string value) {
  if (value.size() > limits_.value_bytes)
    return refuse(fmt::format("the value of \"{}\" has {} bytes; the store accepts at most {}", key, value.size(),
                              limits_.value_bytes));
  const auto old = values_.find(std::string(key));
  const std::size_t freed = old == values_.end() ? 0 : old->second.size();
  const std::size_t added = value.size() + (old == values_.end() ? key.size() + kEntryBytes : 0);
  if (bytes_ - freed + added > limits_.total_bytes)
    return refuse(fmt::format("the store is full: it has {} bytes, at most {}, and \"{}\" needs {} more", bytes_,
                              limits_.total_bytes, key, added - std::min(added, freed)));
  bytes_ = bytes_ - freed + added;
  values_.insert_or_assign(std::string(key), std::move(value));
  ++changes_;
  return std::nullopt;
}

std::string StoreTable::set_all(Reader& fields) {
  const std::vector<std::string> texts = fields.texts();
  require(fields);
  if (texts.size() % 2 != 0) throw InvalidArgument("a request to the store has a key without a value");
  for (std::size_t i = 0; i < texts.size(); i += 2) {
    if (auto refusal = put(texts[i], texts[i + 1])) return *refusal;
  }
  return ok();
}

std::string StoreTable::compare_set(Reader& fields) {
  const std::string key(fields.text());
  const std::string_view expected = fields.text(), desired = fields.text();
  require(fields);
  const auto found = values_.find(key);
  // As c10d's stores: an absent key is set if no value is expected.
  if (found == values_.end() ? !expected.empty() : found->second != expected)
    return Writer(Status::kOk).text(found == values_.end() ? expected : std::string_view(found->second)).finish();
  if (auto refusal = put(key, std::string(desired))) return *refusal;
  return Writer(Status::kOk).text(desired).finish();
}

std::string StoreTable::add(Reader& fields) {
  const std::string key(fields.text());
  const std::int64_t difference = fields.number();
  require(fields);
  std::int64_t sum = 0;
  const auto found = values_.find(key);
  if (found != values_.end() && !parse_number(found->second, sum))
    return refuse(fmt::format("the value of \"{}\" is not a whole number", key));
  if (__builtin_add_overflow(sum, difference, &sum))
    return refuse(fmt::format("the sum of \"{}\" exceeds 64 bits", key));
  if (auto refusal = put(key, std::to_string(sum))) return *refusal;
  return Writer(Status::kOk).number(sum).finish();
}

std::string StoreTable::append(Reader& fields) {
  const std::string key(fields.text());
  const std::string_view value = fields.text();
  require(fields);
  const auto found = values_.find(key);
  if (auto refusal = put(key, (found == values_.end() ? std::string() : found->second).append(value))) return *refusal;
  return ok();
}

std::string StoreTable::remove(Reader& fields) {
  const std::string key(fields.text());
  require(fields);
  const auto found = values_.find(key);
  const bool exists = found != values_.end();
  if (exists) {
    bytes_ -= found->first.size() + found->second.size() + kEntryBytes;
    values_.erase(found);
  }
  return Writer(Status::kOk).number(exists).finish();
}

std::optional<std::string> StoreTable::get(Reader& fields, bool wants_values, PendingRequest& pending) {
  const std::chrono::milliseconds timeout(std::max<std::int64_t>(fields.number(), 0));
  std::vector<std::string> keys = fields.texts();
  require(fields);
  pending = {.keys = std::move(keys), .wants_values = wants_values};
  pending.deadline = PendingRequest::Clock::now() + clamp_timeout(timeout);
  return answer_pending(pending);
}

std::optional<std::string> StoreTable::answer_pending(PendingRequest& pending) const {
  for (; pending.first_missing < pending.keys.size(); ++pending.first_missing) {
    if (!values_.contains(pending.keys[pending.first_missing])) return std::nullopt;
  }
  if (!pending.wants_values) return ok();
  Writer reply(Status::kOk);
  std::size_t bytes = 1;
  for (std::size_t i = 0; i < pending.keys.size(); ++i) {
    const auto found = values_.find(pending.keys[i]);
    if (found == values_.end()) {  // Deleted since.
      pending.first_missing = i;
      return std::nullopt;
    }
    bytes += found->second.size() + 4;
    if (bytes > kMostPayload)
      return refuse(fmt::format("the values of {} keys exceed {} bytes: get fewer keys per call", pending.keys.size(),
                                kMostPayload));
    reply.text(found->second);
  }
  return reply.finish();
}

std::string StoreTable::answer_late(const PendingRequest& pending) const {
  std::vector<std::string> missing;
  for (const std::string& key : pending.keys) {
    if (!values_.contains(key)) missing.push_back(key);
  }
  return Writer(Status::kTimeout).texts(missing).finish();
}

}  // namespace ddpkit::store
