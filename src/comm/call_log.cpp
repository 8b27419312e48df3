#include "comm/call_log.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <fmt/format.h>

namespace ddpkit {
namespace {

std::string kind_text(const Event& call) {
  // Ranks may exchange different sizes.
  if (call.kind == EventKind::kAllToAll) return name_of(call.kind);
  return fmt::format("{}/{}", name_of(call.kind), call.bytes);
}

std::string describe_with_step(const Event& call) {
  return describe(call) + (call.step < 0 ? "" : fmt::format(" at step {}", call.step));
}

}  // namespace

bool CallLog::add(std::uint64_t index, const Event& event, std::function<bool()> has_ended) {
  const std::lock_guard lock(mutex_);
  const bool is_message = event.kind == EventKind::kSend || event.kind == EventKind::kReceive;
  const std::optional<std::uint64_t> number = is_message ? std::nullopt : std::optional(count_++);
  last_ = event;
  calls_.push_back({index, event, number, Clock::now(), std::move(has_ended)});
  return calls_.size() == 1;
}

bool CallLog::look() {
  const std::lock_guard lock(mutex_);
  const auto ended = std::erase_if(calls_, [this](const Call& call) {
    try {
      if (!call.has_ended()) return false;
    } catch (const std::exception& error) {
      const std::string text = error.what();
      if (error_.empty()) error_ = text.substr(0, text.find('\n'));
    }
    EventRing::of_process().finish(call.index);
    return true;
  });
  if (ended != 0) progress_ = Clock::now();
  return !calls_.empty();
}

void CallLog::note_end(std::uint64_t index) {
  const std::lock_guard lock(mutex_);
  const auto call = std::find_if(calls_.rbegin(), calls_.rend(), [=](const Call& one) { return one.index == index; });
  if (call != calls_.rend()) call->has_ended = [] { return true; };
}

std::optional<CallLog::Late> CallLog::late(std::chrono::milliseconds timeout) const {
  const std::lock_guard lock(mutex_);
  // A call may wait for earlier calls.
  if (calls_.empty() || Clock::now() - std::max(calls_.front().since, progress_) < timeout) return std::nullopt;
  const Call& call = calls_.front();
  return Late{call.number, kind_text(call.event), describe_with_step(call.event)};
}

std::string CallLog::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

std::uint64_t CallLog::count() const {
  const std::lock_guard lock(mutex_);
  return count_;
}

std::string CallLog::kind_of(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  const auto call = std::ranges::find(calls_, std::optional(number), &Call::number);
  return call == calls_.end() ? "-" : kind_text(call->event);
}

std::string CallLog::state() const {
  const std::lock_guard lock(mutex_);
  if (!last_) return "has called no collective";
  if (!calls_.empty()) return "is in " + describe_with_step(calls_.front().event);
  return "is in no collective; its last one was " + describe_with_step(*last_);
}

}  // namespace ddpkit
