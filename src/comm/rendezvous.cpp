#include <unistd.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <ddpkit/error.h>

#include "comm/master_address.h"
#include "comm/roll_call.h"
#include "comm/sockets.h"
#include "comm/store/keyed_store.h"
#include "comm/store/store_key.h"
#include "comm/store/store_server.h"

namespace ddpkit {
namespace {

/// The earlier rendezvous of this process.
class RendezvousHistory {
 public:
  static RendezvousHistory& all() {
    static auto* history = new RendezvousHistory;
    return *history;
  }

  int count(const LaunchEnvironment& environment) {
    const std::lock_guard lock(mutex_);
    return counts_[job_of(environment)];
  }
  void add(const LaunchEnvironment& environment) {
    const std::lock_guard lock(mutex_);
    ++counts_[job_of(environment)];
  }

  /// Keeps the store until this process ends. Otherwise a rank that is early for the next rendezvous could connect to
  /// the store of the previous one, which would then end.
  void serve(const LaunchEnvironment& environment, std::shared_ptr<void> store) {
    const std::lock_guard lock(mutex_);
    // Registered after the first store was created, so it runs before the destructors of LibTorch's statics.
    if (served_.empty()) std::atexit([] { all().end_served(); });
    served_.insert_or_assign(address_of(environment), std::move(store));
  }
  bool serves(const LaunchEnvironment& environment) {
    const std::lock_guard lock(mutex_);
    return served_.count(address_of(environment)) != 0;
  }

 private:
  void end_served() {
    // A child made by fork() does not have the stores' threads, and would wait for them.
    if (::getpid() == process_) served_.clear();
  }
  static std::string address_of(const LaunchEnvironment& environment) {
    return fmt::format("{}:{}", environment.master_addr, environment.master_port);
  }
  /// Includes the rank, because ranks of one job may be threads of one process.
  static std::string job_of(const LaunchEnvironment& environment) {
    return fmt::format("{} {} rank {} of {}", address_of(environment), environment.run_id, environment.rank,
                       environment.world_size);
  }

  std::mutex mutex_;
  std::map<std::string, int> counts_;
  std::map<std::string, std::shared_ptr<void>> served_;  ///< TCPStores and StoreServers.
  const pid_t process_ = ::getpid();
};

bool serves_store(const LaunchEnvironment& environment) {
  return environment.rank == 0 && !environment.use_agent_store && !RendezvousHistory::all().serves(environment);
}

c10::intrusive_ptr<c10d::Store> connect_tcp_store(const LaunchEnvironment& environment,
                                                  std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = environment.master_port;
  options.isServer = serves_store(environment);
  options.waitWorkers = false;  // wait_for_ranks() waits and reports the missing ranks.
  options.timeout = timeout;
  if (options.isServer) options.masterListenFd = listen_as_master(environment);
  wait_for_master(environment, "rank 0", timeout);
  auto store = c10::make_intrusive<c10d::TCPStore>(environment.master_addr, options);
  if (options.isServer)
    RendezvousHistory::all().serve(environment, std::make_shared<c10::intrusive_ptr<c10d::TCPStore>>(store));
  return store;
}

/// The launcher serves the store, or rank 0 if only the key file is known.
c10::intrusive_ptr<c10d::Store> connect_keyed_store(LaunchEnvironment environment, std::chrono::milliseconds timeout) {
  store::StorePass pass;
  if (environment.key_descriptor) {
    pass = store::read_pass(*environment.key_descriptor);
    if (pass.port != 0) {
      environment.master_addr = usable_loopback("127.0.0.1");
      environment.master_port = pass.port;
    }
  } else {
    pass = {.key = store::read_key_file(environment.key_file), .run = environment.run_id};
    if (serves_store(environment))
      RendezvousHistory::all().serve(
          environment, std::make_shared<store::StoreServer>(listen_as_master(environment), pass.key, pass.run));
  }
  const std::string host = environment.key_descriptor ? "the launcher of host 0" : "rank 0";
  const SocketAddress address = wait_for_master(environment, host, timeout);
  return c10::make_intrusive<store::KeyedStore>(
      store::StorePlace{.address = address,
                        .name = fmt::format("{}:{}", environment.master_addr, environment.master_port),
                        .key = pass.key,
                        .run = pass.run},
      timeout);
}

}  // namespace

void note_rendezvous(const LaunchEnvironment& environment) { RendezvousHistory::all().add(environment); }

c10::intrusive_ptr<c10d::Store> connect_store(const LaunchEnvironment& environment, std::chrono::milliseconds timeout) {
  if (environment.world_size == 1) return c10::make_intrusive<c10d::HashStore>();
  const bool has_key = environment.key_descriptor || !environment.key_file.empty();
  try {
    auto store = has_key ? connect_keyed_store(environment, timeout) : connect_tcp_store(environment, timeout);
    // The prefix separates runs that use the same port, and the rendezvous of one run.
    return c10::make_intrusive<c10d::PrefixStore>(
        fmt::format("ddpkit/{}/{}", environment.run_id, RendezvousHistory::all().count(environment)), std::move(store));
  } catch (const c10::Error& error) {
    throw RendezvousError(fmt::format("rank {} cannot use the store at {}:{}: {}", environment.rank,
                                      environment.master_addr, environment.master_port, error.what_without_backtrace()),
                          {.call = "rendezvous"});
  }
}

}  // namespace ddpkit
