// Ranks that are threads of this process. All ranks map the shared memory at one address, so ThreadSanitizer sees both
// sides of each exchange; with processes it cannot. Loops of this file write and check the data, because
// ThreadSanitizer does not see the accesses of LibTorch's operators.
#pragma once

#include <ATen/ops/empty.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/comm/shm_backend.h>

#include "comm/backend.h"
#include "comm/symmetric_memory.h"

namespace ddpkit::testing {

/// Timeout of a group: only a hang reaches it.
constexpr std::chrono::seconds kPatience(120);

/// Runs `body` on `ranks` threads, each a rank of one group. Rethrows the exception of the first rank that threw.
/// Catch2's assertions are not thread-safe: bodies call require().
inline void on_threads(int ranks, const std::function<void(ProcessGroup&)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      std::optional<ProcessGroup> group;
      try {
        group.emplace(create_shm_backend(store, rank, ranks, kPatience), store, at::kCPU);
        body(*group);
      } catch (const std::exception& error) {
        failures[static_cast<std::size_t>(rank)] = std::current_exception();
        if (group) group->abort(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

/// Replaces CHECK; any thread may call it.
inline void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

/// Returns element i of rank `rank`'s input for call `number`.
inline std::int32_t value(int number, int rank, std::int64_t i) {
  return static_cast<std::int32_t>((number * 7 + rank * 13 + i) % 1000);
}

using Values = std::function<std::int32_t(std::int64_t)>;

inline void fill(const at::Tensor& tensor, const Values& values) {
  auto* data = tensor.mutable_data_ptr<std::int32_t>();
  for (std::int64_t i = 0; i < tensor.numel(); ++i) data[i] = values(i);
}

inline void check(const at::Tensor& tensor, const Values& values, const std::string& what) {
  const auto* data = tensor.const_data_ptr<std::int32_t>();
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    if (data[i] == values(i)) continue;
    throw std::runtime_error(what + ": element " + std::to_string(i) + " is " + std::to_string(data[i]) + ", not " +
                             std::to_string(values(i)));
  }
}

inline at::Tensor tensor_of(std::int64_t numel, const Values& values) {
  at::Tensor tensor = at::empty({numel}, at::kInt);
  fill(tensor, values);
  return tensor;
}

inline SymmetricMemory& symmetric_memory(const ProcessGroup& group) {
  SymmetricMemory* memory = Backend::of(group)->symmetric_memory();
  require(memory != nullptr, "the ranks of shm map common memory");
  return *memory;
}

}  // namespace ddpkit::testing
