// The fault matrix: checkpoints.
#include <sys/mount.h>

#include <chrono>

#include <ddpkit/train/checkpoint.h>

#include "faults/training.h"

using namespace ddpkit::testing;
using har::testing::weights_of;

namespace {

/// A separate file system in memory. Not available without the right to mount.
class SmallDisk {
 public:
  SmallDisk(const std::filesystem::path& at, std::size_t bytes) : at_(at) {
    std::filesystem::create_directories(at_);
    mounted_ = ::mount("tmpfs", at_.c_str(), "tmpfs", 0, fmt::format("size={}", bytes).c_str()) == 0;
  }
  ~SmallDisk() {
    if (mounted_) ::umount2(at_.c_str(), MNT_DETACH);
  }
  bool mounted() const { return mounted_; }
  void make_read_only() const { REQUIRE(::mount("tmpfs", at_.c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, nullptr) == 0); }

 private:
  std::filesystem::path at_;
  bool mounted_ = false;
};

/// All files of har's run folder.
const std::vector<std::string> kFiles = {"checkpoint.pt", "config.yaml", "confusion.svg",
                                         "curves.svg",    "logs",        "metrics.csv"};

}  // namespace

TEST_CASE("a run with restarts that loses ranks ends with the weights of one never disturbed", "[faults]") {
  kill_and_compare(5, 1);
}

TEST_CASE("SIGTERM ends training at a step, and the same command resumes", "[faults]") {
  const Folder whole, parts;
  const std::vector<std::string> options = {"--epochs", "25", "--json"};
  FaultRun calm(training(whole.path(), options));
  REQUIRE(calm.wait(std::chrono::seconds(120)) == 0);
  for (const int number : {SIGTERM, SIGINT}) {
    FaultRun run(training(parts.path(), options));
    run.wait_for(number == SIGTERM ? "\"epoch\":3," : "\"epoch\":12,");
    const auto signalled = std::chrono::steady_clock::now();
    run.signal(number);
    CHECK(run.wait() == 0);
    CAPTURE(run.err());
    CHECK_THAT(run.err(), ContainsSubstring(number == SIGTERM ? "stopped by SIGTERM after step" : "stopped by SIGINT"));
    CHECK(run.orphans() == std::vector<int>());
    add_row(number == SIGTERM ? "SIGTERM to the launcher" : "SIGINT to the launcher",
            "all ranks end at one step, exit code 0, checkpoint kept",
            std::chrono::duration<double>(std::chrono::steady_clock::now() - signalled).count());
  }
  FaultRun rest(training(parts.path(), options));
  REQUIRE(rest.wait(std::chrono::seconds(120)) == 0);
  CHECK(same_bits(weights_of(whole), weights_of(parts)));
}

TEST_CASE("kill -9 while a checkpoint is written leaves the last one whole", "[faults]") {
  double slowest = 0;
  for (int round = 0; round < 3; ++round) {
    const FaultFolder folder;
    const std::vector<std::string> command = worker_command(folder, {"-n", "2"}, {"--save", "--victim", "0"});
    std::vector<std::string> killed = command;
    killed.insert(killed.end(), {"--act", "kill-in-save", "--at-step", std::to_string(5 + round)});
    FaultRun run(killed);
    CHECK(run.wait() == 137);
    CHECK(run.orphans() == std::vector<int>());
    CHECK(ddpkit::train::read_checkpoint_info(folder / "checkpoint.pt").step >= 4 + round);
    slowest = std::max(slowest, folder.ended_after(run));
    // The new run replaces the incomplete files of the dead run; none remains.
    FaultRun next(command);
    CHECK(next.wait() == 0);
    CHECK(ddpkit::train::read_checkpoint_info(folder / "checkpoint.pt").step == 59);
    for (const std::string& name : names_in(folder.path())) CHECK(name.find(".tmp") == std::string::npos);
  }
  add_row("kill -9 in checkpoint writing, 3 times", "the last checkpoint is whole; the next run leaves no rest",
          slowest);
}

TEST_CASE("a disk that is full or read-only keeps the last checkpoint and is named", "[faults]") {
  const Folder folder;
  const std::vector<std::string> options = {"--epochs", "3", "--json"};
  const Folder probe;
  FaultRun first(training(probe.path(), {"--epochs", "1"}));
  REQUIRE(first.wait() == 0);
  const auto bytes = std::filesystem::file_size(probe / "checkpoint.pt");
  const SmallDisk disk(folder / "small", bytes + bytes / 2);
  if (!disk.mounted()) DDPKIT_SKIP("mounting a small file system needs root");
  // The disk has space for one checkpoint, but not for a second.
  FaultRun full(training(folder / "small", options));
  CHECK(full.wait() == 1);
  CHECK_THAT(full.err(), ContainsSubstring("No space left on device"));
  CHECK(ddpkit::train::read_checkpoint_info(folder / "small" / "checkpoint.pt").epoch == 1);
  CHECK(names_in(folder / "small") == kFiles);
  add_row("disk full", "named, the last checkpoint kept, no rest", full.seconds());

  disk.make_read_only();
  FaultRun read_only(training(folder / "small", options));
  CHECK(read_only.wait() == 1);
  CHECK_THAT(read_only.err(), ContainsSubstring("Read-only file system"));
  CHECK(ddpkit::train::read_checkpoint_info(folder / "small" / "checkpoint.pt").epoch == 1);
  add_row("folder read-only", "named before the training begins", read_only.seconds());
}

TEST_CASE("a damaged checkpoint is refused and left as it is", "[faults]") { damage_checkpoints(3, 2); }

TEST_CASE("a half-written checkpoint of a dead run does not matter", "[faults]") {
  const Folder folder;
  write_file(folder / "checkpoint.pt.tmp", "half of a checkpoint");
  FaultRun run(training(folder.path(), {"--epochs", "1", "--json"}));
  CHECK(run.wait() == 0);
  CHECK(names_in(folder.path()) == kFiles);
  add_row("half-written checkpoint of a dead run", "replaced, and nothing of it stays", run.seconds());
}
