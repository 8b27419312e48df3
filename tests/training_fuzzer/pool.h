// Processes that run cases: one for the reference, and one for each rank or for all ranks. They are forked once, from a
// process that has run no operator, and run many cases.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "case.h"
#include "judge.h"

namespace ddpkit::fuzz {

class Pool {
 public:
  /// `threads`: all ranks are threads of one process, so that ThreadSanitizer sees their shared data.
  explicit Pool(bool threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  /// Replaces the processes after a hang or a crash.
  Verdict run(const Case& drawn);
  /// The next case runs in new processes.
  void replace();

 private:
  struct Worker;

  Verdict run(const Case& drawn, std::size_t runs);
  Worker& worker(std::size_t index);
  std::string name_of(std::size_t process) const;
  std::string last_words() const;

  bool threads_;
  std::string folder_;
  std::string case_folder_;
  std::uint64_t case_number_ = 0;
  std::vector<std::unique_ptr<Worker>> workers_;  ///< The reference, then the ranks.
  int cases_ = 0;                                 ///< Since the processes were replaced.
};

}  // namespace ddpkit::fuzz
