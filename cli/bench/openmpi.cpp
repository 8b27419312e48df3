#include "openmpi.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <sstream>

#include <ddpkit/comm/environment.h>
#include <ddpkit/error.h>
#include <ddpkit/launch/launcher.h>

namespace ddpkit::bench {
namespace {

std::filesystem::path program() {
  return std::filesystem::read_symlink("/proc/self/exe").replace_filename(kOpenMpiProgram);
}

bool is_in_path(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (::access((folder + "/" + name).c_str(), X_OK) == 0) return true;
  }
  return false;
}

/// Other MPI implementations have an mpirun with other options.
bool mpirun_is_open_mpi() {
  std::string output;
  ddpkit::launch({.command = {"mpirun", "--version"},
                  .time_limit = std::chrono::seconds(10),
                  .on_output = [&](int, const std::string& text) { output += text; }});
  return output.find("Open MPI") != std::string::npos || output.find("OpenRTE") != std::string::npos;
}

}  // namespace

std::string why_no_openmpi() {
  if (::access(program().c_str(), X_OK) != 0)
    return "this build has no openmpi_collectives (Debian: install libopenmpi-dev and openmpi-bin, then build again)";
  if (!is_in_path("mpirun")) return "there is no mpirun in PATH (Debian: openmpi-bin)";
  if (!mpirun_is_open_mpi()) return "the mpirun in PATH is not Open MPI's";
  return "";
}

std::vector<std::string> openmpi_command(int ranks, const Plan& plan) {
  std::vector<std::string> command = {"mpirun",
                                      "--allow-run-as-root",
                                      "--oversubscribe",
                                      "--bind-to",
                                      !plan.no_pin && ranks <= available_cores() ? "core" : "none",
                                      "-n",
                                      std::to_string(ranks),
                                      program().string()};
  const std::vector<std::string> arguments = to_arguments(plan);
  command.insert(command.end(), arguments.begin(), arguments.end());
  return command;
}

}  // namespace ddpkit::bench
