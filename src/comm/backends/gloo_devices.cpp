#include "comm/backends/gloo_devices.h"

#ifdef DDPKIT_GLOO
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <set>
#include <sstream>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/parse_number.h>

#include "comm/sockets.h"

namespace ddpkit {
namespace {

std::shared_ptr<gloo::transport::Device> device_of_interface(const std::string& interface) {
  try {
    return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
  } catch (const std::exception& error) {
    throw InvalidArgument(fmt::format(
        "GLOO_SOCKET_IFNAME names the network interface \"{}\", which gloo cannot use: {}", interface, error.what()));
  }
}

std::vector<std::shared_ptr<gloo::transport::Device>> choose_devices(const LaunchEnvironment& environment) {
  using c10d::ProcessGroupGloo;
  if (const char* names = std::getenv("GLOO_SOCKET_IFNAME"); names && *names) {
    std::vector<std::shared_ptr<gloo::transport::Device>> devices;
    std::istringstream list(names);
    for (std::string interface; std::getline(list, interface, ',');) devices.push_back(device_of_interface(interface));
    return devices;
  }
  // On one host, loopback works for any host name and does not accept connections from other hosts.
  if (environment.local_world_size == environment.world_size)
    return {ProcessGroupGloo::createDeviceForHostname(usable_loopback("127.0.0.1"))};
  const std::string address = address_towards(environment.master_addr);
  return {address.empty() ? ProcessGroupGloo::createDefaultDevice()
                          : ProcessGroupGloo::createDeviceForHostname(address)};
}

/// Returns the epoll instances of this process.
std::set<int> epoll_instances() {
  std::set<int> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    int fd = -1;
    if (parse_number(entry.path().filename().string(), fd) &&
        std::filesystem::read_symlink(entry.path(), error) == "anon_inode:[eventpoll]")
      found.insert(fd);
  }
  return found;
}

bool is_connected(int fd) {
  sockaddr_storage peer{};
  socklen_t length = sizeof peer;
  return ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) == 0 && peer.ss_family != AF_UNIX;
}

/// Returns the threads of this process that run gloo's collectives.
std::vector<int> run_loops() {
  std::vector<int> threads;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", error)) {
    std::string name;
    int thread = -1;
    std::getline(std::ifstream(entry.path() / "comm"), name);
    if (name == "pt_gloo_runloop" && parse_number(entry.path().filename().string(), thread)) threads.push_back(thread);
  }
  return threads;
}

}  // namespace

GlooDevices::GlooDevices(const LaunchEnvironment& environment) {
  static std::mutex mutex;  // Another thread could create devices meanwhile.
  const std::lock_guard lock(mutex);
  const std::set<int> before = epoll_instances();
  devices_ = choose_devices(environment);
  std::ranges::set_difference(epoll_instances(), before, std::back_inserter(instances_));
}

std::vector<int> GlooDevices::connected() const {
  std::vector<int> sockets;
  for (const int instance : instances_) {
    std::ifstream info(fmt::format("/proc/self/fdinfo/{}", instance));  // See proc(5).
    for (std::string line; std::getline(info, line);) {
      int fd = -1;
      if (std::sscanf(line.c_str(), "tfd: %d", &fd) == 1 && is_connected(fd)) sockets.push_back(fd);
    }
  }
  return sockets;
}

std::string runs_of_gloo_threads() {
  std::string runs;
  for (const int thread : run_loops()) {
    std::ifstream status(fmt::format("/proc/self/task/{}/status", thread));  // See proc(5).
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("State:") && !line.starts_with("State:\tS")) return {};
      if (line.find("_ctxt_switches:") != line.npos) runs += line;
    }
  }
  return runs;
}

}  // namespace ddpkit
#endif
