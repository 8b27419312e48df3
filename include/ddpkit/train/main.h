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

struct SelfLaunchOptions;

/// State of the running program for run_main().
class Program {
 public:
  /// Calls ddpkit::init_process_group(). If the program fails after this call, run_main() aborts the group.
  ProcessGroup init_process_group(const InitOptions& options = {});

  /// Returns the group; empty before init_process_group().
  const std::optional<ProcessGroup>& group() const noexcept { return group_; }

 private:
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
///       const auto body = [&](ddpkit::train::Program& program) { train(run, program.init_process_group()); };
///       return ddpkit::train::run_main(options, argc, argv, body, &run.launch);
///     }
///
/// If `launch` asks for ranks, starts this program once per rank instead of running `body`. Only one rank prints the
/// error: the rank that caused it, or rank 0 if it happened on all ranks.
int run_main(Options& options, int argc, const char* const* argv, const std::function<void(Program&)>& body,
             const SelfLaunchOptions* launch = nullptr) noexcept;

/// Returns an exception's message on one line, without the stack trace in c10::Error.
std::string one_sentence(const std::exception_ptr& error);

}  // namespace ddpkit::train
