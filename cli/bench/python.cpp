#include "python.h"

#include <unistd.h>

#include <cstdlib>

#include <fmt/format.h>

namespace ddpkit::bench {
namespace {

constexpr const char* kPython = "DDPKIT_PEER_PYTHON";
constexpr const char* kTorchft = "DDPKIT_PEER_TORCHFT";

std::string program_in(const char* variable) {
  const char* path = std::getenv(variable);
  return path ? path : "";
}

/// Returns why the Python in `variable`, which has `package`, cannot be used. `example`: where a script installs it.
std::string why_none(const char* variable, const char* package, const char* example) {
  const std::string program = program_in(variable);
  if (program.empty())
    return fmt::format("--peers needs {}: let {} name a python that has it (script/bootstrap --peers installs one, {})",
                       package, variable, example);
  if (::access(program.c_str(), X_OK) != 0) return fmt::format("{} is {}, which is no program", variable, program);
  if (::access(DDPKIT_PEERS_FOLDER, R_OK | X_OK) != 0)
    return fmt::format("--peers needs the sources' folder {}, which is gone", DDPKIT_PEERS_FOLDER);
  return "";
}

std::vector<std::string> command_of(const char* variable, const std::string& script) {
  return {program_in(variable), "-u", fmt::format("{}/{}", DDPKIT_PEERS_FOLDER, script)};
}

}  // namespace

std::string why_no_python() { return why_none(kPython, "Python's PyTorch", ".deps/torch/bin/python"); }
std::string why_no_torchft() { return why_none(kTorchft, "torchft", ".deps/torchft/bin/python"); }

std::string python_package() {
  return ::access(DDPKIT_PYTHON_FOLDER "/ddpkit_torch/__init__.py", R_OK) == 0 ? DDPKIT_PYTHON_FOLDER : "";
}

std::vector<std::string> python_command(const std::string& script) { return command_of(kPython, script); }
std::vector<std::string> torchft_command(const std::string& script) { return command_of(kTorchft, script); }

}  // namespace ddpkit::bench
