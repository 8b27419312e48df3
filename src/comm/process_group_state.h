// Tier 2: c10d's Backend.hpp. What the copies of a ProcessGroup share.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>

#include "comm/backend.h"

namespace ddpkit {

struct ProcessGroup::State {
  /// A child made by fork() must not delete the state: it would wait for threads that it does not have, and the end of
  /// the group would be reported to the other ranks.
  struct Deleter {
    void operator()(State* state) const {
      if (::getpid() != state->process) return;
      state->backend->leave();
      delete state;
    }
  };

  void abort(const std::string& reason) noexcept {
    if (!shut_down) backend->abort_group(reason);
    const std::lock_guard lock(parts_mutex);
    for (const auto& part : parts) {
      if (const auto alive = part.lock()) alive->abort(reason);
    }
  }

  void add_part(const std::shared_ptr<State>& part) {
    const std::lock_guard lock(parts_mutex);
    std::erase_if(parts, [](const auto& earlier) { return earlier.expired(); });
    parts.push_back(part);
  }

  /// Throws if shutdown() has ended the group.
  Backend& open() const {
    if (shut_down) throw Error(kShutDown);
    return *backend;
  }

  /// Continues with another backend, after ranks were lost or have joined.
  void continue_in(c10::intrusive_ptr<Backend> next) {
    next->follow(*backend);
    backend = std::move(next);
    native = backend->native();
    environment.rank = environment.local_rank = backend->getRank();
    environment.world_size = environment.local_world_size = backend->getSize();
  }

  c10::intrusive_ptr<Backend> backend;
  c10::intrusive_ptr<c10d::Backend> native;
  c10::intrusive_ptr<c10d::Store> store;
  at::Device device;
  LaunchEnvironment environment;
  std::string backend_name;
  std::uint64_t generation = 0;
  std::optional<std::uint64_t> last_join_step = {};  ///< See Joining::is_due().
  std::optional<int> joining_name = {};              ///< Number in messages of a new rank that waits; see Joining.
  std::atomic<int> splits = 0;
  std::atomic<bool> shut_down = false;
  pid_t process = ::getpid();
  std::mutex parts_mutex = {};
  std::vector<std::weak_ptr<State>> parts = {};  ///< Results of split().
};

}  // namespace ddpkit
