#include "comm/call_log.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "comm/trace/recorder.h"

namespace ddpkit {
namespace {

std::string kind_of_record(std::uint64_t index) {
  const flight::Record& record = flight::Recorder::of_process().record(index);
  const auto call = static_cast<flight::Call>(record.what.load() & 0xff);
  // Ranks may exchange different sizes.
  if (call == flight::Call::kAllToAll) return flight::name_of(call);
  return fmt::format("{}/{}", flight::name_of(call), record.bytes.load());
}

std::string describe_record(std::uint64_t index) {
  const flight::Record& record = flight::Recorder::of_process().record(index);
  const std::int64_t step = record.step.load();
  return flight::describe(record) + (step < 0 ? "" : fmt::format(" at step {}", step));
}

}  // namespace

bool CallLog::add(std::uint64_t record, bool is_message, std::function<bool()> has_ended) {
  const std::lock_guard lock(mutex_);
  const std::optional<std::uint64_t> number = is_message ? std::nullopt : std::optional(count_++);
  last_record_ = record;
  calls_.push_back({record, number, Clock::now(), std::move(has_ended)});
  return calls_.size() == 1;
}

bool CallLog::look() {
  const std::lock_guard lock(mutex_);
  const auto ended = std::erase_if(calls_, [](const Call& call) {
    if (!call.has_ended()) return false;
    flight::Recorder::of_process().finish(call.record);
    return true;
  });
  if (ended != 0) progress_ = Clock::now();
  return !calls_.empty();
}

std::optional<CallLog::Late> CallLog::late(std::chrono::milliseconds timeout) const {
  const std::lock_guard lock(mutex_);
  // A call may wait for earlier calls.
  if (calls_.empty() || Clock::now() - std::max(calls_.front().since, progress_) < timeout) return std::nullopt;
  const Call& call = calls_.front();
  return Late{call.number, kind_of_record(call.record), describe_record(call.record)};
}

std::uint64_t CallLog::count() const {
  const std::lock_guard lock(mutex_);
  return count_;
}

std::string CallLog::kind_of(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  const auto call = std::ranges::find(calls_, std::optional(number), &Call::number);
  return call == calls_.end() ? "-" : kind_of_record(call->record);
}

std::string CallLog::state() const {
  const std::lock_guard lock(mutex_);
  if (!last_record_) return "has called no collective";
  if (!calls_.empty()) return "is in " + describe_record(calls_.front().record);
  return "is in no collective; its last one was " + describe_record(*last_record_);
}

}  // namespace ddpkit
