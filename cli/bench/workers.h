// Tier 0: the standard library only.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <ddpkit/error.h>
#include <ddpkit/launch/launcher.h>

namespace ddpkit::bench {

/// A rank ended before it had answered. The message says which, and how.
class WorkerFailed : public Error {
 public:
  WorkerFailed(const std::string& message, int exit_code) : Error(message), exit_code_(exit_code) {}
  int exit_code() const noexcept { return exit_code_; }

 private:
  int exit_code_;
};

/// The backend that the workers were to use is not here. The message says why.
class NoBackend : public Error {
 public:
  using Error::Error;
};

/// The ranks of one system that is measured: processes that sleep until they are asked to do something, so that several
/// systems can take turns on the same cores.
///
/// Each rank reads its questions, a line each, from a pipe whose number stands at its place in the list behind
/// `--control`, and prints one line that begins with `answer_prefix` to each, the first when it is ready to be asked.
/// At the pipe's end it ends too. Any other line that it prints goes to stderr behind the system's name and its rank.
class Workers {
 public:
  struct Options {
    std::string system;                ///< For messages.
    std::vector<std::string> command;  ///< `--control` and its list are added.
    int ranks = 1;
    std::string answer_prefix;
    std::string no_backend_prefix;  ///< A rank says so behind this, and ends, when its backend is not here.
  };

  /// Returns when all are ready. Throws WorkerFailed or NoBackend.
  explicit Workers(Options options);
  /// Lets them end and waits for that.
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  /// Asks the ranks `first` to `first + count - 1` and waits for all their answers. [rank - first]
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
  std::vector<std::string> pending_;  ///< Output that is no whole line yet. [rank]
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<std::string>> answers_;  ///< [rank]
  std::string no_backend_;
  bool ended_ = false;
  LocalLaunchResult result_;
  std::exception_ptr launch_error_;
  std::thread thread_;
};

/// The rank's end: the next question, or nothing at the pipe's end.
class Questions {
 public:
  /// `control`: the list behind `--control`. Throws InvalidArgument.
  Questions(const std::string& control, int rank);
  bool next(std::string& question);

 private:
  int fd_;
  std::string pending_;
};

}  // namespace ddpkit::bench
