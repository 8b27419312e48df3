// The processes in which tests run: a failure of one must fail the test and must not affect another.
#include "support/children.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <future>
#include <stdexcept>

#include "support/catch.h"
#include "support/folder.h"

using ddpkit::testing::ChildrenOptions;
using ddpkit::testing::run_children;

namespace {

const ChildrenOptions kPatient{.time_limit = std::chrono::seconds(100)};

[[noreturn]] void hang() {
  while (true) ::pause();
}

/// Returns whether a process runs. A zombie that waits for its new parent does not run.
bool runs(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::string number, name, state;
  return file >> number >> name >> state && state != "Z";
}

}  // namespace

TEST_CASE("each child has its output and its end", "[children]") {
  const auto result = run_children(4,
                                   [](int index) {
                                     std::cout << "child " << index << std::endl;
                                     if (index == 1) ::raise(SIGKILL);
                                     if (index == 2) throw std::runtime_error("no luck");
                                     return index;
                                   },
                                   {.time_limit = std::chrono::seconds(100), .stop_on_failure = false});
  CHECK_FALSE(result.timed_out);
  CHECK(result.ends[0].ok());
  CHECK(result.ends[0].output == "child 0\n");
  CHECK_FALSE(result.ends[1].ok());
  CHECK(result.ends[1].describe() == "was killed by signal 9 (Killed)");
  CHECK(result.ends[2].describe() == "exited with code 1");
  CHECK(result.ends[2].output == "child 2\nno luck\n");
  CHECK(result.ends[3].describe() == "exited with code 3");
}

TEST_CASE("a failure ends the other children", "[children]") {
  int ignores[2];  // A pipe: the failure waits until the last child ignores SIGTERM.
  REQUIRE(::pipe(ignores) == 0);
  const auto result = run_children(
      3,
      [&](int index) -> int {
        char byte = 0;
        if (index == 1) return ::read(ignores[0], &byte, 1) == 1 ? 1 : 2;
        if (index == 2) {
          ::signal(SIGTERM, SIG_IGN);
          if (::write(ignores[1], &byte, 1) != 1) return 2;
        }
        hang();
      },
      kPatient);
  for (const int end : ignores) ::close(end);
  CHECK_FALSE(result.timed_out);
  CHECK_FALSE(result.ends[1].stopped);
  CHECK(WEXITSTATUS(result.ends[1].status) == 1);
  CHECK(result.ends[0].stopped);
  CHECK(WTERMSIG(result.ends[2].status) == SIGKILL);
}

TEST_CASE("a hang is killed with all processes of its group", "[children]") {
  const ddpkit::testing::Folder folder;
  const auto result = run_children(1,
                                   [&](int) -> int {
                                     const pid_t other = ::fork();
                                     if (other == 0) hang();
                                     ddpkit::testing::write_file(folder / "pid", std::to_string(other));
                                     hang();
                                   },
                                   {.time_limit = std::chrono::seconds(1), .own_groups = true});
  CHECK(result.timed_out);
  CHECK(result.ends[0].stopped);
  const std::string other = ddpkit::testing::read_file(folder / "pid");
  REQUIRE_FALSE(other.empty());
  for (int tries = 0; tries < 1000 && runs(other); ++tries) ::usleep(10000);
  CHECK_FALSE(runs(other));
}

TEST_CASE("a process that outlives a child does not hold up its end", "[children]") {
  const auto result = run_children(1,
                                   [](int) {
                                     if (::fork() == 0) hang();  // Keeps stdout open.
                                     std::cout << "done" << std::endl;
                                     return 0;
                                   },
                                   {.time_limit = std::chrono::seconds(100), .own_groups = true});
  CHECK(result.ends[0].ok());
  CHECK(result.ends[0].output == "done\n");
}

TEST_CASE("a process of several threads has no children", "[children]") {
  std::promise<void> done;
  const auto thread = std::async(std::launch::async, [&] { done.get_future().wait(); });
  CHECK_THROWS_AS(run_children(
                      1, [](int) { return 0; }, kPatient),
                  std::logic_error);
  done.set_value();
}
