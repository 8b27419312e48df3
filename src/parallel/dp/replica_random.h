// Tier 1. Random numbers of CPU replicas.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <mutex>

namespace ddpkit {

/// The seed of one call's replicas: drawn from LibTorch's generator for the CPU, which it moves on, when the first of
/// them needs it, whichever that is.
class ReplicaSeed {
 public:
  std::uint64_t get();

 private:
  std::once_flag once_;
  std::uint64_t seed_ = 0;
};

/// While it lives, operators that this thread calls on CPU tensors without a generator (dropout, randn, ...) draw from
/// one of its own instead of the process's, from which replicas would draw in whatever order they happen to run.
class ReplicaRandom {
 public:
  ReplicaRandom(ReplicaSeed& seed, int replica);
  ~ReplicaRandom();
  ReplicaRandom(const ReplicaRandom&) = delete;
  ReplicaRandom& operator=(const ReplicaRandom&) = delete;

  /// The generator, made when it is first asked for: most replicas never do.
  const at::Generator& generator();

 private:
  ReplicaSeed& seed_;
  int replica_;
  ReplicaRandom* before_;
  at::Generator generator_;
  c10::impl::IncludeDispatchKeyGuard include_;
};

}  // namespace ddpkit
