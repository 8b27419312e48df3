// Tier 1: ATen/core/Tensor.h, through process_group.h.
#pragma once

#include <exception>
#include <functional>
#include <optional>
#include <string>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>
#include <ddpkit/train/options.h>

namespace ddpkit::train {

struct RunOptions;

/// State of the running program for run_main().
class Program {
 public:
  /// Of run_main(). All arguments must outlive the program.
  Program(const std::string& name, int argc, const char* const* argv) : name_(name), argc_(argc), argv_(argv) {}

  /// Calls ddpkit::init_process_group(). If the program fails after this call, run_main() aborts the group.
  ProcessGroup init_process_group(const InitOptions& options = {});

  /// Joins the ranks of a training: calls init_process_group() with run.backend. If run.launch asks for ranks that no
  /// launcher has started, starts this program once per rank and waits; then this function does not return, and
  /// run_main() returns the exit code of the ranks. If the program fails later, its last line names the option that
  /// resumes the run. `run` must outlive the program.
  ProcessGroup join(const RunOptions& run, InitOptions options = {});

  /// Returns the group; empty before init_process_group().
  const std::optional<ProcessGroup>& group() const noexcept { return group_; }
  /// Returns the options of join(); null before.
  const RunOptions* run() const noexcept { return run_; }

 private:
  const std::string& name_;
  int argc_;
  const char* const* argv_;
  const RunOptions* run_ = nullptr;
  std::optional<ProcessGroup> group_;
};

/// The main function of a trainer: parses the command line and runs `body`. If `body` throws, prints one sentence to
/// stderr. Returns the exit code: 0 success, 1 failure, 2 wrong option or config file. Never prints a stack trace,
/// never throws.
///
///     int main(int argc, char** argv) {
///       ddpkit::train::Options options("something", "Trains something.");
///       ddpkit::train::RunOptions run;
///       ddpkit::train::declare(options, run);
///       const auto body = [&](ddpkit::train::Program& program) { train(run, program.join(run)); };
///       return ddpkit::train::run_main(options, argc, argv, body);
///     }
///
/// Only one rank prints the error: the rank that caused it, or rank 0 if it happened on all ranks.
int run_main(Options& options, int argc, const char* const* argv, const std::function<void(Program&)>& body) noexcept;

/// Returns an exception's message on one line, without the stack trace in c10::Error.
std::string one_sentence(const std::exception_ptr& error);

}  // namespace ddpkit::train
