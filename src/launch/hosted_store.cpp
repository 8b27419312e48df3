#include "launch/hosted_store.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/master_address.h"
#include "comm/sockets.h"
#include "comm/store/wire.h"
#include "launch/rank_process.h"

namespace ddpkit::launcher {

std::string key_file_of(const LaunchOptions& options) {
  const char* variable = std::getenv(store::kKeyFileVariable);
  return !options.key_file.empty() ? options.key_file : variable ? variable : "";
}

HostedStore::HostedStore(const LaunchOptions& options, int port) {
  store::StorePass pass{.run = fmt::format("{}/{}", run_name(options, port), options.restart_count)};
  int listener = -1;
  if (options.nodes == 1) {
    pass.key = store::random_digest();
    const auto free_port = listen_on(usable_loopback("127.0.0.1"), listener);
    if (!free_port) throw Error(fmt::format("the store cannot be served on 127.0.0.1: {}", std::strerror(errno)));
    pass.port = *free_port;
  } else {
    const std::string file = key_file_of(options);
    if (file.empty()) {
      if (options.node_rank == 0)
        std::fputs(fmt::format("[ddpkit] everybody who reaches {}:{} can join this run, because there is no "
                               "--key-file\n",
                               options.master_addr, port)
                       .c_str(),
                   stderr);
      return;
    }
    pass.key = store::read_key_file(file);
    LaunchEnvironment master;
    master.master_addr = usable_loopback(options.master_addr);
    master.master_port = static_cast<std::uint16_t>(port);
    if (options.node_rank == 0) listener = listen_as_master(master);
  }
  pass_.emplace(pass);
  if (listener >= 0) server_.emplace(listener, pass.key, pass.run);
}

}  // namespace ddpkit::launcher
