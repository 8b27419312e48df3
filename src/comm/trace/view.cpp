#include "comm/trace/view.h"

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
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

namespace ddpkit::flight {
namespace {

double seconds_since(std::chrono::steady_clock::time_point then) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - then).count();
}

/// Of CLOCK_MONOTONIC, which is also the clock of steady_clock.
double seconds_since(std::uint64_t then_ms) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::max(0.0, std::chrono::duration<double>(now).count() - static_cast<double>(then_ms) / 1000);
}

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

/// Returns whether the process has a handler for the signal. Another process may have the same ID now, and a signal
/// without a handler would kill it.
bool handles(int pid, int signal) {
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("SigCgt:"))
      return (std::strtoull(line.c_str() + std::strlen("SigCgt:"), nullptr, 16) >> (signal - 1) & 1) != 0;
  }
  return false;
}

}  // namespace

View::View() {
  fd_ = ::memfd_create("ddpkit-flight-recorder", MFD_CLOEXEC);
  if (fd_ < 0 || ::fchmod(fd_, 0600) != 0 || ::ftruncate(fd_, sizeof(Page)) != 0)
    throw Error(fmt::format("no memory for the flight recorder: {}", std::strerror(errno)));
  void* memory = ::mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (memory == MAP_FAILED) throw Error(fmt::format("no memory for the flight recorder: {}", std::strerror(errno)));
  page_ = new (memory) Page;
  page_->layout.store(kLayout);
}

View::~View() {
  if (page_) ::munmap(page_, sizeof(Page));
  if (fd_ >= 0) ::close(fd_);
}

View::View(View&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      page_(std::exchange(other.page_, nullptr)),
      stacks_before_(other.stacks_before_),
      seen_(other.seen_),
      seen_at_(other.seen_at_) {}

Failure View::failure() const noexcept { return page_->outcome.load().failure; }

std::optional<int> View::culprit() const noexcept {
  const std::int32_t culprit = page_->outcome.load().culprit;
  return culprit < 0 ? std::nullopt : std::optional<int>(culprit);
}

bool View::is_in_rendezvous(int world) const noexcept {
  return page_->phase.load() == Phase::kRendezvous && page_->world.load() == world;
}

bool View::has_connected() const noexcept { return page_->phase.load() == Phase::kTraining || has_left(); }

bool View::has_left() const noexcept { return page_->phase.load() == Phase::kLeft; }

void View::sample() noexcept {
  const std::uint64_t next = page_->next.load();
  const std::uint64_t finished = next == 0 ? 0 : page_->records[(next - 1) % kRecords].finished.load();
  if (2 * next + finished == seen_) return;
  seen_ = 2 * next + finished;
  seen_at_ = Clock::now();
}

std::string describe(const Record& record) {
  const std::uint64_t what = record.what.load();
  const std::uint64_t bucket = what >> 32;
  return fmt::format("{} number {} ({} bytes, group {}{})", name_of(static_cast<Call>(what & 0xff)),
                     record.sequence.load(), record.bytes.load(), (what >> 8) & 0xffffff,
                     bucket == 0 ? "" : fmt::format(", bucket {}", bucket - 1));
}

std::string View::state(bool ended) const {
  if (page_->pid.load() == 0) return ended ? "" : "has not come to init_process_group";
  const std::uint64_t next = page_->next.load();
  const std::int64_t step = page_->step.load();
  const std::string at = step < 0 ? "" : fmt::format(" at step {}", step);
  if (next == 0) {
    if (page_->phase.load() == Phase::kRendezvous)
      return ended ? "was in the rendezvous with the other ranks" : "is in the rendezvous with the other ranks";
    return (ended ? "had called no collective" : "has called no collective") + at;
  }
  const double age = seconds_since(seen_at_);
  // The newest collective may be finished while an older one is not.
  for (std::uint64_t index = next < kRecords ? 0 : next - kRecords; index < next; ++index) {
    const Record& record = page_->records[index % kRecords];
    if (record.index.load() != index || record.finished.load() != 0) continue;
    if (ended) return fmt::format("was in {}{}", describe(record), at);
    const std::uint64_t started = record.started_ms.load();
    return fmt::format("is in {}{} for {:.1f} s", describe(record), at, started != 0 ? seconds_since(started) : age);
  }
  const std::string last = describe(page_->records[(next - 1) % kRecords]);
  if (ended) return fmt::format("was in no collective{}; its last one was {}", at, last);
  return fmt::format("is in no collective{}; its last one was {}, {:.1f} s ago", at, last, age);
}

std::string View::history() const {
  std::string text;
  const std::uint64_t next = page_->next.load();
  for (std::uint64_t index = next < kRecords ? 0 : next - kRecords; index < next; ++index) {
    const Record& record = page_->records[index % kRecords];
    if (record.index.load() != index) continue;
    const std::uint64_t started = record.started_ms.load();
    const std::int64_t step = record.step.load();
    text += fmt::format("{:>8}  {:>8}  {:>10}  {}{}\n", index, step < 0 ? "-" : std::to_string(step),
                        started == 0 ? "-" : fmt::format("-{:.3f} s", seconds_since(started)), describe(record),
                        record.finished.load() != 0 ? "" : "  not finished");
  }
  return text;
}

bool View::ask_for_stack(int pid) noexcept {
  stacks_before_ = page_->stacks.load();
  const int signal = page_->stack_signal.load();
  const int recorded = page_->pid.load();
  return signal > 0 && recorded > 0 && pid > 0 && handles(recorded, signal) && ::kill(recorded, signal) == 0;
}

bool View::has_stack() const noexcept { return page_->stacks.load() != stacks_before_; }

std::string View::stack() const {
  if (!has_stack()) return {};
  std::istringstream lines(
      std::string(page_->stack, std::min<std::size_t>(page_->stack_bytes.load(), sizeof page_->stack)));
  std::string text;
  for (std::string line; std::getline(lines, line);) text += readable(line) + "\n";
  return text;
}

std::string stopped_text(int pid) {
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("State:") && line.find('T') != std::string::npos &&
        line.find("(stopped)") != std::string::npos)
      return "is stopped (SIGSTOP)";
  }
  return {};
}

}  // namespace ddpkit::flight
