// Launchers that find each other at an endpoint. They run on this host, each in the role of a host.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "faults/fault_run.h"
#include "support/catch.h"
#include "support/port.h"

namespace ddpkit::testing {

/// One run: its key and the port of its endpoint.
class Endpoint {
 public:
  using Arguments = std::vector<std::string>;

  Endpoint() : key_(make_key("key", 'a')), port_(TakenPort().port()) {}

  /// Returns the file of a key of 32 equal bytes.
  std::string make_key(const std::string& name, char byte) const {
    const std::string file = folder_ / name;
    write_file(file, std::string(32, byte));
    std::filesystem::permissions(file, std::filesystem::perms(0600));
    return file;
  }
  /// Connects to the store. Returns the descriptor, or -1.
  int connect() const {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port_);
    if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return fd;
    ::close(fd);
    return -1;
  }
  std::string address() const { return fmt::format("localhost:{}", port_); }
  /// Returns the options of one launcher, except -n.
  Arguments options(const Arguments& more) const {
    Arguments options{"--rdzv-endpoint", address(), "--rdzv-id", "job", "--key-file", key_};
    options.insert(options.end(), more.begin(), more.end());
    return options;
  }
  /// Returns `run -n RANKS OPTIONS... -- sh -c SCRIPT`.
  Arguments shell(const Arguments& more, const std::string& script, int ranks = 1) const {
    Arguments command{"run", "-n", std::to_string(ranks)};
    const Arguments all = options(more);
    command.insert(command.end(), all.begin(), all.end());
    command.insert(command.end(), {"--", "sh", "-c", script});
    return command;
  }
  /// Returns a run of the fault worker.
  Arguments worker(const FaultFolder& folder, const Arguments& more, const Arguments& worker_options,
                   int ranks = 1) const {
    Arguments launcher = options(more);
    launcher.insert(launcher.end(), {"-n", std::to_string(ranks)});
    return worker_command(folder, launcher, worker_options);
  }
  /// Waits until a launcher serves the store. This launcher is host 0.
  void wait_for_host_0() const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    for (;;) {
      if (const int fd = connect(); fd >= 0) {
        ::close(fd);
        return;
      }
      if (std::chrono::steady_clock::now() > deadline) FAIL("no launcher serves the store");
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

 private:
  Folder folder_;
  std::string key_;
  std::uint16_t port_;
};

/// "host 1 (NAME)".
inline std::string host_name(int host) {
  std::string name;
  std::getline(std::ifstream("/proc/sys/kernel/hostname"), name);
  return fmt::format("host {} ({})", host, name);
}

}  // namespace ddpkit::testing
