#include "network.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include <fmt/format.h>

namespace ddpkit::cli {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

/// `error` is empty on success.
Addresses resolve(const std::string& name, int port, std::string& error) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int status = ::getaddrinfo(name.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (status != 0) error = ::gai_strerror(status);
  return {found, &::freeaddrinfo};
}

/// Returns why a process cannot listen on the address; empty if it can. `elsewhere`: the address belongs to another
/// host.
std::string why_not_listen(const addrinfo& address, bool& elsewhere) {
  const int fd = ::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return std::strerror(errno);
  // SO_REUSEADDR, as the store sets it: a port with connections in TIME_WAIT counts as free.
  const int on = 1;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  std::string reason;
  if (::bind(fd, address.ai_addr, address.ai_addrlen) != 0 || ::listen(fd, 1) != 0) {
    elsewhere = errno == EADDRNOTAVAIL;
    reason = std::strerror(errno);
  }
  ::close(fd);
  return reason;
}

}  // namespace

Findings examine_network(const std::string& master_addr, int master_port) {
  Findings findings;
  const auto add = [&](Severity severity, std::string what, std::string advice = {}) {
    findings.push_back({"network", severity, std::move(what), std::move(advice)});
  };
  std::string error;
  if (const Addresses addresses = resolve(master_addr, master_port, error); !addresses) {
    add(Severity::kProblem, fmt::format("MASTER_ADDR {} does not resolve: {}", master_addr, error),
        fmt::format("Give the host of rank 0 by a name or address that this host knows, in place of {}.", master_addr));
  } else {
    bool elsewhere = false;
    const std::string reason = why_not_listen(*addresses, elsewhere);
    if (reason.empty())
      add(Severity::kFine, fmt::format("rendezvous at {}:{}: the port is free", master_addr, master_port));
    else if (elsewhere)
      add(Severity::kFine, fmt::format("rendezvous at {}:{} is on another host", master_addr, master_port));
    else
      add(Severity::kProblem, fmt::format("rendezvous at {}:{}: {}", master_addr, master_port, reason),
          fmt::format(
              "Choose another port (MASTER_PORT, --master-port), or let ddpkit run take a free one; who has {} is "
              "shown by: ss -ltnp 'sport = :{}'.",
              master_port, master_port));
  }
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  error.clear();
  if (const Addresses own = resolve(name, 0, error); own)
    add(Severity::kFine, fmt::format("the host's name {} resolves", name));
  else
    add(Severity::kAdvice, fmt::format("the host's name {} does not resolve: {}", name, error),
        "For training on several hosts, put the name into DNS or /etc/hosts; on one host nothing needs it.");
  return findings;
}

}  // namespace ddpkit::cli
