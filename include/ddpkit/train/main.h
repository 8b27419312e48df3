// Tier 1: ATen/core/Tensor.h, through process_group.h.
#pragma once

#include <exception>
#include <functional>
#include <optional>
#include <string>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>

namespace CLI {
class App;
}

namespace ddpkit::train {

/// A wrong option or config file: run_main() ends with exit code 2.
class UsageError : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

/// What run_main() knows of the running program.
class Program {
 public:
  /// Joins the job as ddpkit::init_process_group does. When the program fails from here on, its other ranks are told.
  ProcessGroup init_process_group(const InitOptions& options = {});

  /// Empty before init_process_group().
  const std::optional<ProcessGroup>& group() const noexcept { return group_; }

 private:
  std::optional<ProcessGroup> group_;
};

/// The main function of a trainer: parses the command line, runs `body`, and turns whatever it throws into one sentence
/// on stderr and an exit code: 0 done, 1 failed, 2 wrong option or config file. Never prints a stack trace, never
/// throws.
///
///     int main(int argc, char** argv) {
///       CLI::App app("Trains something.", "something");
///       Options options;
///       ddpkit::train::add_trainer_options(app, options.trainer);
///       return ddpkit::train::run_main(app, argc, argv, [&](ddpkit::train::Program& program) {
///         train(options, program.init_process_group());
///       });
///     }
///
/// Of several ranks only one speaks: the rank at fault, or, for what happens on all of them, rank 0.
int run_main(CLI::App& app, int argc, const char* const* argv, const std::function<void(Program&)>& body) noexcept;

/// An exception's message on one line, without the stack trace that c10::Error carries.
std::string one_sentence(const std::exception_ptr& error);

}  // namespace ddpkit::train
