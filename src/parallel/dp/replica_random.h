// Tier 1. Random numbers of CPU replicas.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <mutex>

namespace ddpkit {

/// The seed of the replicas in one call. The first replica that needs the seed draws it from LibTorch's CPU generator.
class ReplicaSeed {
 public:
  std::uint64_t get();

 private:
  std::once_flag once_;
  std::uint64_t seed_ = 0;
};

/// While it lives, operators on CPU tensors that this thread calls without a generator (dropout, randn, ...) use a
/// separate generator. With the process's generator, the numbers would depend on the order in which the replicas run.
class ReplicaRandom {
 public:
  ReplicaRandom(ReplicaSeed& seed, int replica);
  ~ReplicaRandom();
  ReplicaRandom(const ReplicaRandom&) = delete;
  ReplicaRandom& operator=(const ReplicaRandom&) = delete;

  /// Returns the generator. Creates it on first use, because most replicas need none.
  const at::Generator& generator();

 private:
  ReplicaSeed& seed_;
  int replica_;
  ReplicaRandom* before_;
  at::Generator generator_;
  c10::impl::IncludeDispatchKeyGuard include_;
};

}  // namespace ddpkit
