#include "python.h"

#include <unistd.h>

#include <cstdlib>

#include <fmt/format.h>

namespace ddpkit::bench {
namespace {

std::string python() {
  const char* path = std::getenv("DDPKIT_PEER_PYTHON");
  return path ? path : "";
}

}  // namespace

std::string why_no_python() {
  if (python().empty())
    return "--peers needs Python's PyTorch: let DDPKIT_PEER_PYTHON name a python that has it (script/bootstrap --peers "
           "installs one, .deps/torch/bin/python)";
  if (::access(python().c_str(), X_OK) != 0)
    return fmt::format("DDPKIT_PEER_PYTHON is {}, which is no program", python());
  if (::access(DDPKIT_PEERS_FOLDER, R_OK | X_OK) != 0)
    return fmt::format("--peers needs the sources' folder {}, which is gone", DDPKIT_PEERS_FOLDER);
  return "";
}

std::string python_package() {
  return ::access(DDPKIT_PYTHON_FOLDER "/ddpkit_torch/__init__.py", R_OK) == 0 ? DDPKIT_PYTHON_FOLDER : "";
}

std::vector<std::string> python_command(const std::string& script) {
  return {python(), "-u", fmt::format("{}/{}", DDPKIT_PEERS_FOLDER, script)};
}

}  // namespace ddpkit::bench
