// Replaces the operating system and the kernels for the engine: shared memory is the arena, processes are the
// simulation's ranks, and a reduction reports its reads and writes.
#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/shm/engine.h"
#include "comm/shm/mapping.h"
#include "comm/shm/process_watch.h"
#include "kernels/reduce.h"
#include "memory.h"
#include "simulation.h"
#include "world.h"

namespace ddpkit::schedules {
namespace {

/// Memory taken from the arena. [descriptor]
std::vector<std::byte*>& files() {
  static std::vector<std::byte*> files;
  return files;
}

std::shared_ptr<std::byte> unowned(std::byte* pages) {
  return {pages, [](std::byte*) {}};
}

/// [rank] The last one: outside the simulation.
std::array<std::unique_ptr<shm::Engines>, kMaxRanks + 1>& processes() {
  static std::array<std::unique_ptr<shm::Engines>, kMaxRanks + 1> processes;
  return processes;
}

bool is_dead(int pid) {
  const Simulation* const simulation = Simulation::current();
  return simulation && simulation->is_dead(pid - kFirstPid);
}

}  // namespace

void forget_memory() {
  for (auto& engines : processes()) engines.reset();
  files().clear();
  Arena::instance().reset();
}

}  // namespace ddpkit::schedules

namespace ddpkit::shm {

using schedules::Simulation;

Mapping::~Mapping() { close_descriptor(); }
void Mapping::close_descriptor() noexcept {
  if (fd_ >= 0) schedules::files()[static_cast<std::size_t>(std::exchange(fd_, -1))] = nullptr;
}

Mapping Mapping::create(const std::string&, std::size_t bytes, Populate) {
  Mapping mapping;
  mapping.pages_ = schedules::unowned(schedules::Arena::instance().take(bytes));
  mapping.size_ = bytes;
  mapping.fd_ = static_cast<int>(schedules::files().size());
  schedules::files().push_back(mapping.pages_.get());
  return mapping;
}

Mapping Mapping::open(const RankProcessId& owner, int fd, std::size_t bytes, Populate, const std::function<bool()>&) {
  if (schedules::is_dead(owner.pid))
    throw PeerLost(fmt::format("rank {} (pid {}) ended before its shared memory was opened", owner.rank, owner.pid),
                   {.rank = owner.rank, .call = "rendezvous"});
  std::byte* const pages = schedules::files().at(static_cast<std::size_t>(fd));
  if (pages == nullptr)
    throw RendezvousError(fmt::format("the memory of rank {} is closed", owner.rank), {.rank = owner.rank});
  Mapping mapping;
  mapping.pages_ = schedules::unowned(pages);
  mapping.size_ = bytes;
  return mapping;
}

Engines& Engines::all() {
  const Simulation* const simulation = Simulation::current();
  auto& engines =
      schedules::processes().at(static_cast<std::size_t>(simulation ? simulation->rank() : schedules::kMaxRanks));
  if (!engines) engines = std::make_unique<Engines>();
  return *engines;
}

LifePage life_page() { return {}; }
ProcessWatch::ProcessWatch(int pid, LifePage) : pid_(pid) {}
ProcessWatch::~ProcessWatch() = default;
ProcessWatch::ProcessWatch(ProcessWatch&& other) noexcept : pid_(other.pid_) {}
ProcessWatch& ProcessWatch::operator=(ProcessWatch&& other) noexcept {
  pid_ = other.pid_;
  return *this;
}
bool ProcessWatch::alive() const noexcept {
  if (Simulation* const simulation = Simulation::current()) simulation->point();
  return !schedules::is_dead(pid_);
}

}  // namespace ddpkit::shm

namespace ddpkit::kernels {

using schedules::Simulation;

/// The scenarios need only a sum of int64.
void reduce(const ReduceArguments& arguments) {
  Simulation& simulation = *Simulation::current();
  if (arguments.dtype != DataType::kInt64 || arguments.op != Reduction::kSum) simulation.fail("not a sum of int64");
  const std::size_t bytes = arguments.numel * sizeof(std::int64_t);
  std::vector<std::int64_t> sum(arguments.numel);
  const auto read = [&](const void* from) {
    if (schedules::Arena::instance().contains(from)) simulation.memory().read(simulation.rank(), from, bytes);
    return static_cast<const std::int64_t*>(from);
  };
  const auto write = [&](void* to, const std::int64_t* values) {
    if (schedules::Arena::instance().contains(to)) simulation.memory().write(simulation.rank(), to, bytes);
    std::memcpy(to, values, bytes);
  };
  for (std::size_t r = 0; r < arguments.input_count; ++r) {
    const std::int64_t* input = read(arguments.inputs[r]);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += input[i];
  }
  for (std::size_t k = 0; k < arguments.output_count; ++k) write(arguments.outputs[k], sum.data());
  if (arguments.copy_to) write(arguments.copy_to, read(arguments.copy_from));
}

}  // namespace ddpkit::kernels
