// Processes that a test program forks: one per test case, one per rank.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace ddpkit::testing {

struct ChildrenOptions {
  /// Only a hanging run reaches this limit. Then all children are killed.
  std::chrono::milliseconds time_limit;
  /// If a child fails, the others get SIGTERM, and SIGKILL one second later.
  bool stop_on_failure = true;
  /// Each child leads a process group, which is killed when the child has ended. Otherwise the children stay in this
  /// process's group.
  bool own_groups = false;
};

struct ChildEnd {
  int status = 0;        ///< As waitpid() returns it.
  bool stopped = false;  ///< It ended after the others failed or the time limit was reached.
  double seconds = 0;
  std::string output = {};  ///< stdout and stderr, in the order of writing.

  bool ok() const noexcept { return status == 0; }
  /// "exited with code 3" or "was killed by signal 9 (Killed)".
  std::string describe() const;
};

struct ChildrenResult {
  std::vector<ChildEnd> ends;  ///< [child]
  bool timed_out = false;
};

/// Forks `count` children. Each runs `body` with its index and exits with the result. Waits for all of them.
/// A forked child has only the thread that forked it, and every lock that another thread held stays locked. Throws
/// std::logic_error if this process has several threads.
ChildrenResult run_children(int count, const std::function<int(int)>& body, const ChildrenOptions& options);

/// Returns the number of failed Catch2 assertions in this process, including those before its fork.
int failed_assertions();

}  // namespace ddpkit::testing
