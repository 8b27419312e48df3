#include "rank.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <chrono>
#include <iostream>
#include <limits>

#include <fmt/format.h>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>

#include "collective.h"
#include "device.h"
#include "group_peers.h"
#include "row.h"

namespace ddpkit::bench {
namespace {

/// The arguments of one call. In place: `output` is `input`.
struct Call {
  const ProcessGroup& group;
  at::Tensor input;
  at::Tensor output;
};

struct GroupCall {
  const char* name;  ///< One of collectives().
  void (*call)(Call& c);
};

/// One line per collective: its name and the call on a ProcessGroup.
const std::vector<GroupCall>& group_calls() {
  static const std::vector<GroupCall> calls = {
      {"all_reduce", [](Call& c) { c.group.all_reduce(c.output); }},
      {"broadcast", [](Call& c) { c.group.broadcast(c.output, 0); }},
      {"all_gather", [](Call& c) { c.group.all_gather_into(c.output, c.input); }},
      {"reduce_scatter", [](Call& c) { c.group.reduce_scatter(c.output, c.input); }},
      {"reduce", [](Call& c) { c.group.reduce(c.output, 0); }},
      {"gather",
       [](Call& c) {
         const at::Tensor all = c.group.gather(c.input, 0);
         if (all.defined()) c.output = all.view({-1});
       }},
      {"scatter",
       [](Call& c) {
         c.group.scatter(c.output, c.input.view({c.group.world_size(), -1}), 0);
       }},
      {"all_to_all", [](Call& c) { c.group.all_to_all(c.output, c.input); }},
      {"send_recv",
       [](Call& c) {
         const int ranks = c.group.world_size(), rank = c.group.rank();
         Work sent = c.group.send_async(c.input, (rank + 1) % ranks);
         c.group.recv(c.output, (rank + ranks - 1) % ranks);
         sent.wait();
       }},
  };
  return calls;
}

/// Buffers of the largest size. Each row uses the beginning of the buffers.
class Measurement {
 public:
  Measurement(const ProcessGroup& group, const GroupCall& call, const std::string& memory, std::uint64_t max_bytes)
      : group_(group), peers_(group), call_(call), what_(find_collective(call.name)), memory_(memory) {
    const std::size_t whole = exact_bytes(what_, max_bytes, group.world_size()) / sizeof(float);
    input_ = buffer(extent(what_.input, whole));
    output_ = what_.in_place ? input_ : buffer(extent(what_.output, whole));
  }

  Row measure(const std::string& backend, std::uint64_t wanted_bytes, const TimingOptions& timing) {
    const std::uint64_t bytes = exact_bytes(what_, wanted_bytes, group_.world_size());
    const std::size_t whole = bytes / sizeof(float);
    Call arguments{group_, input_.narrow(0, 0, extent(what_.input, whole)),
                   output_.narrow(0, 0, extent(what_.output, whole))};
    std::uint64_t wrong = check(arguments, whole);
    // Sums of zeros stay zero in all repetitions.
    arguments.input.zero_();
    const double us = median_us(
        peers_, [&] { call_.call(arguments); }, timing);
    wrong += check(arguments, whole);
    return {what_.name.data(), backend, group_.world_size(), bytes, memory_, us, peers_.sum_over_ranks(wrong)};
  }

 private:
  std::int64_t extent(Extent extent, std::size_t whole) const {
    const auto ranks = static_cast<std::size_t>(group_.world_size());
    return static_cast<std::int64_t>(extent == Extent::kWhole ? whole : whole / ranks);
  }

  at::Tensor buffer(std::int64_t numel) const {
    if (memory_ == "symmetric") return group_.allocate({numel}, at::kFloat);
    return at::empty({numel}, at::device(group_.device()).dtype(at::kFloat));
  }

  /// Makes one call on fresh inputs. Returns the number of wrong elements on this rank.
  std::uint64_t check(Call& arguments, std::size_t whole) const {
    if (!what_.in_place) arguments.output.fill_(std::numeric_limits<float>::quiet_NaN());
    // The CPU buffer, or a copy of the GPU buffer.
    const at::Tensor input = arguments.input.cpu();
    fill_input(group_.rank(), input.data_ptr<float>(), static_cast<std::size_t>(input.numel()));
    arguments.input.copy_(input);
    group_.barrier();
    call_.call(arguments);
    const at::Tensor output = arguments.output.cpu();
    const auto ranks = static_cast<std::size_t>(group_.world_size());
    const Place place{group_.rank(), group_.world_size(), what_.is_cut ? whole / ranks : whole};
    const auto numel = static_cast<std::size_t>(output.numel());
    const auto wanted = static_cast<std::size_t>(extent(what_.output, whole));
    const std::uint64_t wrong = numel == wanted ? count_wrong(what_, place, output.data_ptr<float>(), wanted) : wanted;
    // No rank may overwrite a buffer that another rank still reads.
    group_.barrier();
    return wrong;
  }

  const ProcessGroup& group_;
  GroupPeers peers_;
  const GroupCall& call_;
  const Collective& what_;
  std::string memory_;
  at::Tensor input_;
  at::Tensor output_;
};

}  // namespace

std::vector<std::string> group_collectives() {
  std::vector<std::string> names;
  for (const GroupCall& call : group_calls()) names.emplace_back(call.name);
  return names;
}

int run_rank(const std::string& backend, const Plan& plan) {
  at::set_num_threads(1);
  const LaunchEnvironment environment = read_launch_environment();
  const c10::Device device = place_rank(plan.device, environment, !plan.no_pin);
  const c10::OptionalDeviceGuard on_device(device);
  std::optional<ProcessGroup> group;
  try {
    group = init_process_group({.backend = backend, .device = device, .timeout = std::chrono::minutes(2)});
  } catch (const InvalidArgument& error) {
    std::cout << kReason << error.what() << std::endl;
    return kNoBackend;
  }
  // With other backends, allocate() returns normal memory.
  const bool has_own = (backend == "shm" && device.is_cpu()) || backend == "nccl";
  const std::vector<std::string> memory = has_own ? plan.memory : std::vector<std::string>{"private"};
  const std::vector<std::uint64_t> sizes = plan.sizes();
  for (const std::string& name : plan.collectives) {
    for (const GroupCall& call : group_calls()) {
      if (call.name != name) continue;
      for (const std::string& kind : memory) {
        Measurement measurement(*group, call, kind, sizes.back());
        for (const std::uint64_t bytes : sizes) {
          const Row row = measurement.measure(backend, bytes, plan.timing);
          if (group->rank() == 0) std::cout << to_report(row) << std::endl;
        }
      }
    }
  }
  group->barrier();  // A rank that exits early looks like a failed rank.
  return 0;
}

}  // namespace ddpkit::bench
