// Each system call of the launcher and of the ranks fails in turn. No data may be lost, and each fault must be
// reported.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/train/checkpoint.h>

#include "faults/training.h"
#include "support/seed.h"
#include "syscalls/calls.h"
#include "syscalls/check.h"

using namespace ddpkit::testing;
using har::testing::weights_of;

namespace {

/// Number of uses of a call that fail, each in its run.
constexpr int kUses = 4;
/// Only a hanging run reaches this limit.
constexpr std::chrono::seconds kLimit(40);
constexpr std::array<const char*, kProcesses> kNames = {"launcher", "rank 0", "rank 1"};

/// The `use`-th use of a call by one process.
struct Case {
  int process = 0;  ///< Index into kNames.
  int call = 0;     ///< Index into kCalls.
  int use = 0;      ///< From 1.

  const Call& callee() const { return kCalls[static_cast<std::size_t>(call)]; }
  int error() const {
    const auto& errors = callee().errors;
    return errors[1] == 0 ? errors[0] : errors[static_cast<std::size_t>(use - 1) % 2];
  }
  std::string name() const {
    return fmt::format("{}: {} {} {}", kNames[static_cast<std::size_t>(process)], callee().name, use,
                       ::strerrorname_np(error()));
  }
};

/// A known fault.
struct Known {
  std::string_view cases;  ///< Prefix of the names of its cases.
  std::string_view words;  ///< Text in the fault's description.
  /// The fault occurs in each run. The test fails if it does not occur; then remove the line. False if the failing use
  /// depends on the timing of threads and ranks.
  bool always = true;
};

constexpr std::array kKnown = {
    // LibTorch's store does not report why it could not start.
    Known{"rank 0: epoll_create 1 EMFILE", "Failed to init uv loop"},
    Known{"rank 0: eventfd 1 EMFILE", "Failed to init uv loop"},
    Known{"rank 0: pipe 2 ENFILE", "Failed to init uv loop"},
    Known{"rank 0: pipe 1 EMFILE", "SIGABRT"},
    // On a loaded machine, the store retries with another socket.
    Known{"rank 0: getsockname 1 ENOBUFS", "The port number of the socket cannot be retrieved", false},
};

bool is_known(const std::string& name, const std::string& fault) {
  return std::any_of(kKnown.begin(), kKnown.end(), [&](const Known& known) {
    return name.starts_with(known.cases) && fault.find(known.words) != std::string::npos;
  });
}

bool must_fail(const std::string& name) {
  return std::any_of(kKnown.begin(), kKnown.end(),
                     [&](const Known& known) { return known.always && known.cases == name; });
}

/// The counts, in memory shared with the processes of a run.
class Counts {
 public:
  explicit Counts(const std::filesystem::path& file) {
    write_file(file, std::string(kProcesses * sizeof(CallCounts), '\0'));
    const int fd = ::open(file.c_str(), O_RDWR | O_CLOEXEC);
    REQUIRE(fd >= 0);
    void* mapped = ::mmap(nullptr, kProcesses * sizeof(CallCounts), PROT_READ, MAP_SHARED, fd, 0);
    ::close(fd);
    REQUIRE(mapped != MAP_FAILED);
    counts_ = static_cast<const CallCounts*>(mapped);
  }
  ~Counts() { ::munmap(const_cast<CallCounts*>(counts_), kProcesses * sizeof(CallCounts)); }
  Counts(const Counts&) = delete;
  Counts& operator=(const Counts&) = delete;

  int operator()(const Case& one) const { return counts_[one.process].uses[one.call]; }

 private:
  const CallCounts* counts_ = nullptr;
};

class Trainings {
 public:
  Trainings() {
    // Writes a checkpoint from which each run resumes. Each run makes three more steps and writes the next checkpoint.
    FaultRun first(training(begun_.path(), joined({"--max-steps", "3"}, options_)));
    REQUIRE(first.wait() == 0);
    REQUIRE(ddpkit::train::read_checkpoint_info(begun_ / "checkpoint.pt").epoch == 1);
    const Folder whole, notes;
    const Counts counts(notes / "counts");
    std::filesystem::copy(begun_ / "checkpoint.pt", whole / "checkpoint.pt");
    FaultRun run(training(whole.path(), options_), preload(notes, nullptr));
    REQUIRE(run.wait() == 0);
    for (int process = 0; process < kProcesses; ++process) {
      for (int call = 0; call < static_cast<int>(kCalls.size()); ++call) {
        Case one{process, call, 1};
        for (const int used = counts(one); one.use <= std::min(used, kUses); ++one.use) cases_.push_back(one);
      }
    }
    weights_ = weights_of(whole);
  }

  /// The cases that an undisturbed run reaches.
  const std::vector<Case>& cases() const { return cases_; }

  /// Returns the fault of a run in which `one` fails; empty if there is none. Sets `end` to the way in which the run
  /// ended.
  std::string disturb(const Case& one, std::string& end) const {
    const Folder folder, notes;
    const Counts counts(notes / "counts");
    std::filesystem::copy(begun_ / "checkpoint.pt", folder / "checkpoint.pt");
    FaultRun run(training(folder.path(), options_), preload(notes, &one));
    const std::optional<int> code = run.ended_within(kLimit);
    const std::string output = run.out() + run.err();
    end = fmt::format("no end within {} s", kLimit.count());
    if (!code) return end + ":\n" + output;
    end = fmt::format("exit code {}", *code);
    if (!run.orphans().empty()) return end + ", orphans:\n" + output;
    if (counts(one) < one.use) {
      end += ", not reached";
      return *code == 0 ? "" : end + ":\n" + output;
    }
    try {
      const auto weights = weights_of(folder);
      if (*code == 0) return same_bits(weights, weights_) ? "" : end + ", other weights:\n" + output;
    } catch (const ddpkit::Error& error) {
      return end + fmt::format(", the checkpoint is lost: {}:\n", error.what()) + output;
    }
    std::vector<std::string> names = {std::string(one.callee().name), ::strerrorname_np(one.error()),
                                      std::strerror(one.error())};
    if (one.error() == EADDRINUSE) names.push_back("is already taken");
    if (one.error() == EAGAIN) names.push_back("is being written by another process");  // Error of flock().
    const bool named = std::any_of(names.begin(), names.end(),
                                   [&](const std::string& name) { return output.find(name) != std::string::npos; });
    if (!named) return end + ", not named:\n" + output;
    end += ", named";
    return output.find("terminate called") == std::string::npos ? "" : end + ", by a crash:\n" + output;
  }

 private:
  static Arguments preload(const Folder& notes, const Case* one) {
    Arguments command = {"env", "LD_PRELOAD=" DDPKIT_TEST_INJECT_LIBRARY,
                         "DDPKIT_TEST_CALLS=" + (notes / "counts").string()};
    if (one)
      command.push_back(
          fmt::format("DDPKIT_TEST_INJECT={} {} {} {}", one->process, one->callee().name, one->use, one->error()));
    return command;
  }

  const Arguments options_ = {"--epochs", "2", "--batch-size", "20"};
  Folder begun_;
  std::vector<Case> cases_;
  std::vector<at::Tensor> weights_;
};

}  // namespace

void ddpkit::testing::check_system_calls(std::size_t drawn) {
  std::mt19937 random(static_cast<unsigned>(seed_of_this_run()));
  const Trainings trainings;
  std::cout << fmt::format("{} of {} cases\n", std::min(drawn, trainings.cases().size()), trainings.cases().size());
  std::vector<Case> cases;
  std::sample(trainings.cases().begin(), trainings.cases().end(), std::back_inserter(cases), drawn, random);
  for (const Case& one : cases) {
    std::string end;
    const std::string fault = trainings.disturb(one, end);
    const bool known = !fault.empty() && is_known(one.name(), fault);
    std::cout << fmt::format("{:<36} {}{}\n", one.name(), fault.empty() ? end : fault.substr(0, fault.find('\n')),
                             known ? " (known)" : "")
              << std::flush;
    CAPTURE(one.name(), fault);
    CHECK((fault.empty() || known));
    const bool is_no_known_fault_any_more = fault.empty() && must_fail(one.name());
    CHECK_FALSE(is_no_known_fault_any_more);
  }
}
