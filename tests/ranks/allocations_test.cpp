// Counts the allocations of a collective.
#include <algorithm>
#include <cstdlib>
#include <new>

#include <torch/torch.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "support/catch.h"
#include "support/ranks.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
TEST_CASE("an all_reduce of c10d makes at most three allocations", "[shm]") {
  DDPKIT_SKIP("sanitizers have their own operator new");
}
#else
namespace {

thread_local std::size_t allocations = 0;

void* allocate(std::size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

RANK_TEST("an all_reduce of c10d makes at most three allocations", "[shm]", 2) {
  std::vector<torch::Tensor> tensors{torch::ones({100})};
  const auto backend = group.backend();
  std::size_t most = 0;
  for (int call = 0; call < 100; ++call) {
    const std::size_t before = allocations;
    backend->allreduce(tensors)->wait();
    if (call >= 50) most = std::max(most, allocations - before);
  }
  CHECK(most > 0);
  CHECK(most <= 3);
  CHECK(tensors[0][0].item<float>() > 1);
  group.barrier();
}
#endif
