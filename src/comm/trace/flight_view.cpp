#include "comm/trace/flight_view.h"

#include <cxxabi.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <new>
#include <sstream>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

namespace ddpkit {
namespace {

double seconds_ago(std::int64_t then_ns) { return std::max(0.0, static_cast<double>(now_ns() - then_ns) / 1e9); }

/// Converts "program(_ZN3foo3barEv+0x12) [0x55]" to "foo::bar() (program)". A function without a name keeps its offset.
std::string readable(const std::string& line) {
  const auto open = line.find('('), close = line.find(')', open);
  if (open == std::string::npos || close == std::string::npos) return line;
  const std::string file = line.substr(line.rfind('/', open) + 1, open - line.rfind('/', open) - 1);
  const std::string inside = line.substr(open + 1, close - open - 1);
  const std::string symbol = inside.substr(0, inside.find('+'));
  if (symbol.empty()) return fmt::format("{}{}", file, inside);
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status),
                                                         &std::free);
  return fmt::format("{} ({})", status == 0 ? name.get() : symbol.c_str(), file);
}

/// Returns the value of `key` in the process's status; empty if the process does not exist.
std::string process_status(int pid, std::string_view key) {
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key)) return line.substr(key.size());
  }
  return {};
}

/// Returns whether the process has a handler for the signal. Another process may have the same ID now, and a signal
/// without a handler would kill it.
bool handles(int pid, int signal) {
  return (std::strtoull(process_status(pid, "SigCgt:").c_str(), nullptr, 16) >> (signal - 1) & 1) != 0;
}

}  // namespace

FlightView::FlightView() {
  fd_ = ::memfd_create("ddpkit-flight-recorder", MFD_CLOEXEC);
  if (fd_ < 0 || ::fchmod(fd_, 0600) != 0 || ::ftruncate(fd_, sizeof(EventPage)) != 0)
    throw Error(fmt::format("no memory for the flight recorder: {}", std::strerror(errno)));
  void* memory = ::mmap(nullptr, sizeof(EventPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (memory == MAP_FAILED) throw Error(fmt::format("no memory for the flight recorder: {}", std::strerror(errno)));
  page_ = new (memory) EventPage;
  page_->layout.store(EventPage::kLayout);
}

FlightView::~FlightView() {
  if (page_) ::munmap(page_, sizeof(EventPage));
  if (fd_ >= 0) ::close(fd_);
}

FlightView::FlightView(FlightView&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      page_(std::exchange(other.page_, nullptr)),
      stacks_before_(other.stacks_before_),
      seen_(other.seen_),
      seen_at_ns_(other.seen_at_ns_) {}

FlightView& FlightView::operator=(FlightView&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(page_, other.page_);
  std::swap(stacks_before_, other.stacks_before_);
  std::swap(seen_, other.seen_);
  std::swap(seen_at_ns_, other.seen_at_ns_);
  return *this;
}

FailureKind FlightView::failure() const noexcept { return page_->outcome.load().failure; }

std::optional<int> FlightView::failed_rank() const noexcept {
  const std::int32_t rank = page_->outcome.load().failed_rank;
  return rank < 0 ? std::nullopt : std::optional<int>(rank);
}

bool FlightView::is_in_rendezvous(int world) const noexcept {
  return page_->phase.load() == RankPhase::kRendezvous && page_->world.load() == world;
}

bool FlightView::is_joining() const noexcept { return page_->phase.load() == RankPhase::kJoining; }

void FlightView::set_joining(int ranks) noexcept { page_->joining.store(ranks); }

bool FlightView::has_connected() const noexcept { return page_->phase.load() == RankPhase::kTraining || has_left(); }

bool FlightView::has_left() const noexcept { return page_->phase.load() == RankPhase::kLeft; }

void FlightView::sample() noexcept {
  const std::uint64_t next = page_->next.load();
  const auto last = next == 0 ? std::nullopt : page_->read(next - 1);
  const std::uint64_t seen = 2 * next + (last && last->finished ? 1 : 0);
  if (seen == seen_) return;
  seen_ = seen;
  seen_at_ns_ = now_ns();
}

std::vector<Event> FlightView::events() const {
  std::vector<Event> events;
  const std::uint64_t next = page_->next.load();
  for (std::uint64_t index = next < kEvents ? 0 : next - kEvents; index < next; ++index) {
    if (const auto event = page_->read(index)) events.push_back(*event);
  }
  return events;
}

std::string FlightView::state(bool ended) const {
  if (page_->pid.load() == 0) return ended ? "" : "has not come to init_process_group";
  auto calls = events();
  std::erase_if(calls, [](const Event& event) { return is_activity(event.kind); });
  const std::int64_t step = page_->step.load();
  const std::string at = step < 0 ? "" : fmt::format(" at step {}", step);
  if (calls.empty()) {
    if (page_->phase.load() == RankPhase::kRendezvous)
      return ended ? "was in the rendezvous with the other ranks" : "is in the rendezvous with the other ranks";
    return fmt::format("{} called no collective{}{}", ended ? "had" : "has",
                       page_->next > kEvents ? fmt::format(" in its last {} events", kEvents) : "", at);
  }
  const double age = seconds_ago(seen_at_ns_);
  // The newest collective may be finished while an older one is not.
  for (const Event& event : calls) {
    if (event.finished) continue;
    if (ended) return fmt::format("was in {}{}", describe(event), at);
    return fmt::format("is in {}{} for {:.1f} s", describe(event), at,
                       event.begin_ns != 0 ? seconds_ago(event.begin_ns) : age);
  }
  const std::string last = describe(calls.back());
  if (ended) return fmt::format("was in no collective{}; its last one was {}", at, last);
  return fmt::format("is in no collective{}; its last one was {}, {:.1f} s ago", at, last, age);
}

std::string FlightView::history() const {
  std::string text;
  for (const Event& event : events()) {
    text += fmt::format(
        "{:>8}  {:>8}  {:>10}  {}{}\n", event.index, event.step < 0 ? "-" : std::to_string(event.step),
        event.begin_ns == 0 ? "-" : fmt::format("-{:.3f} s", seconds_ago(event.begin_ns)), describe(event),
        is_activity(event.kind) ? fmt::format(", {:.3f} ms", static_cast<double>(event.end_ns - event.begin_ns) / 1e6)
        : event.finished        ? ""
                                : "  not finished");
  }
  return text;
}

bool FlightView::ask_for_stack(int pid) noexcept {
  stacks_before_ = page_->stacks.load();
  const int signal = page_->stack_signal.load();
  const int recorded = page_->pid.load();
  return signal > 0 && recorded > 0 && pid > 0 && handles(recorded, signal) && ::kill(recorded, signal) == 0;
}

bool FlightView::has_stack() const noexcept { return page_->stacks.load() != stacks_before_; }

std::string FlightView::stack() const {
  if (!has_stack()) return {};
  std::istringstream lines(
      std::string(page_->stack, std::min<std::size_t>(page_->stack_bytes.load(), sizeof page_->stack)));
  std::string text;
  for (std::string line; std::getline(lines, line);) text += readable(line) + "\n";
  return text;
}

std::string stopped_text(int pid) {
  return process_status(pid, "State:").find("T (stopped)") == std::string::npos ? "" : "is stopped (SIGSTOP)";
}

}  // namespace ddpkit
