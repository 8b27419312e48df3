// Tier 0: the standard library only.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <ddpkit/error.h>
#include <ddpkit/launch/launcher.h>

namespace ddpkit::bench {

/// A rank ended before it answered. The message has the rank and the cause.
class WorkerFailed : public Error {
 public:
  WorkerFailed(const std::string& message, int exit_code) : Error(message), exit_code_(exit_code) {}
  int exit_code() const noexcept { return exit_code_; }

 private:
  int exit_code_;
};

/// Runs a benchmark and returns its exit code. If a worker fails, prints the cause and returns the worker's exit code.
int run_with_workers(const std::function<int()>& benchmark);

/// The backend of the workers is not available. The message has the reason.
class NoBackend : public Error {
 public:
  using Error::Error;
};

/// The ranks of one measured system. The processes sleep between questions, so several systems can take turns on the
/// same cores.
///
/// Each rank reads one question per line from its pipe: the descriptor at its index in the list after `--control`. The
/// rank answers each question with one line that begins with `answer_prefix`. Its first such line reports that the rank
/// is ready. At the end of the pipe the rank exits. Other output goes to stderr, prefixed with system and rank.
class Workers {
 public:
  struct Options {
    std::string system;                ///< For messages.
    std::vector<std::string> command;  ///< `--control` and its list are appended.
    int ranks = 1;
    std::string answer_prefix;
    std::string no_backend_prefix;  ///< A rank without its backend prints the reason after this prefix and exits.
  };

  /// Returns when all ranks are ready. Throws WorkerFailed or NoBackend.
  explicit Workers(Options options);
  /// Ends the ranks and waits for them.
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  /// Sends a question to `count` ranks from `first` on and waits for all answers. [rank - first]
  std::vector<std::string> ask(const std::string& question, int first, int count);
  std::vector<std::string> ask_all(const std::string& question) { return ask(question, 0, options_.ranks); }

  int ranks() const noexcept { return options_.ranks; }

 private:
  struct Pipe {
    int read_end = -1;
    int write_end = -1;
  };

  void launch();
  void take_output(int rank, const std::string& text);
  void take_line(int rank, const std::string& line);
  std::vector<std::string> wait_for_answers(int first, int count);
  [[noreturn]] void throw_ended();
  void close_pipes() noexcept;

  Options options_;
  std::vector<Pipe> pipes_;           ///< [rank]
  std::vector<std::string> pending_;  ///< Incomplete lines of output. [rank]
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<std::string>> answers_;  ///< [rank]
  std::string no_backend_;
  bool ended_ = false;
  LaunchResult result_;
  std::exception_ptr launch_error_;
  std::thread thread_;
};

/// The reader in the rank. Returns the next question, or nothing at the end of the pipe.
class Questions {
 public:
  /// `control`: the list after `--control`. Throws InvalidArgument.
  Questions(const std::string& control, int rank);
  bool next(std::string& question);

 private:
  int fd_;
  std::string pending_;
};

}  // namespace ddpkit::bench
