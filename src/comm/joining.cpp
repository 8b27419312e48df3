#include "comm/joining.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <ddpkit/error.h>

#include "comm/backend.h"
#include "comm/process_group_state.h"
#include "comm/roll_call.h"
#include "comm/shm/control.h"
#include "comm/shm/process_watch.h"
#include "comm/trace/event_ring.h"

namespace ddpkit {
namespace {

constexpr const char* kRequests = "joining/requests";  ///< Number of requests. Each has a number, from 1.
constexpr std::chrono::milliseconds kPoll(5);

std::string request_key(std::int64_t number) { return fmt::format("joining/request/{}", number); }
std::string answer_key(std::int64_t number) { return fmt::format("joining/answer/{}", number); }

std::vector<std::int64_t> numbers_in(const std::string& text) {
  std::istringstream words(text);
  std::vector<std::int64_t> numbers;
  for (std::int64_t number = 0; words >> number;) numbers.push_back(number);
  return numbers;
}

struct Request {
  std::int64_t number = 0;
  std::int64_t name = 0;  ///< Of the new rank, in messages.
  int pid = 0;
};

/// Returns the requests that have no answer, of processes that run.
std::vector<Request> open_requests(c10d::Store& store) {
  std::vector<Request> open;
  const std::int64_t count = store.add(kRequests, 0);
  for (std::int64_t number = 1; number <= count; ++number) {
    if (!store.check({request_key(number)}) || store.check({answer_key(number)})) continue;
    const auto words = numbers_in(text_of(store.get(request_key(number))));
    const Request request{.number = number, .name = words.at(0), .pid = static_cast<int>(words.at(1))};
    if (!shm::ProcessWatch(request.pid).alive()) {
      store.set(answer_key(number), bytes_of("ended"));
    } else {
      open.push_back(request);
    }
  }
  return open;
}

/// The group after new ranks have joined. The new ranks come last.
struct Plan {
  std::uint64_t generation = 0;
  int former_ranks = 0;
  std::int64_t first_request = 0;  ///< Makes the keys of the rendezvous unique.
  std::vector<int> names = {};     ///< Numbers in messages. [rank]

  std::string text(int rank) const {
    return fmt::format("{} {} {} {} {}", rank, generation, former_ranks, first_request, fmt::join(names, " "));
  }
  /// Returns the rank.
  int read(const std::string& text) {
    const std::vector<std::int64_t> numbers = numbers_in(text);
    if (numbers.size() < 5) throw Error(fmt::format("\"{}\" is no answer to a new rank", text));
    generation = static_cast<std::uint64_t>(numbers[1]);
    former_ranks = static_cast<int>(numbers[2]);
    first_request = numbers[3];
    names.assign(numbers.begin() + 4, numbers.end());
    return static_cast<int>(numbers[0]);
  }
  c10::intrusive_ptr<c10d::Store> rendezvous(const c10::intrusive_ptr<c10d::Store>& store) const {
    return c10::make_intrusive<c10d::PrefixStore>(fmt::format("joining/{}", first_request), store);
  }
  Regroup change() const {
    Regroup change{.generation = generation, .lost = {}, .old_rank_of = std::vector<int>(names.size(), -1)};
    std::iota(change.old_rank_of.begin(), change.old_rank_of.begin() + former_ranks, 0);
    return change;
  }
};

}  // namespace

void Joining::begin(const ProcessGroup& group, int name) { group.state_->joining_name = name; }

bool Joining::is_due(const ProcessGroup& group, std::uint64_t step) {
  ProcessGroup::State& state = *group.state_;
  std::atomic<std::uint64_t>* const due = state.open().join_step();
  if (!due) return false;
  // All ranks see it when they have completed this step, because each step has a collective with rank 0.
  if (group.rank() == 0 && due->load() == shm::kNoStep && EventRing::of_process().others_join() &&
      !open_requests(*state.store).empty())
    due->store(step + 1);
  return due->load() == step && std::exchange(state.last_join_step, step) != step;
}

Regroup Joining::admit(const ProcessGroup& group) {
  ProcessGroup::State& state = *group.state_;
  std::vector<Request> requests;
  std::string own = std::to_string(state.backend->name());
  if (group.rank() == 0) {
    requests = open_requests(*state.store);
    for (const Request& request : requests) own += fmt::format(" {} {}", request.number, request.name);
  }
  const auto texts = group.all_gather_bytes(own);
  if (group.rank() == 0) state.backend->join_step()->store(shm::kNoStep);
  Plan plan{.generation = ++state.generation, .former_ranks = group.world_size()};
  for (const std::string& text : texts) plan.names.push_back(static_cast<int>(numbers_in(text).at(0)));
  const auto asked = numbers_in(texts[0]);
  for (std::size_t i = 1; i + 1 < asked.size(); i += 2) plan.names.push_back(static_cast<int>(asked[i + 1]));
  if (std::ssize(plan.names) == plan.former_ranks) return plan.change();
  plan.first_request = asked[1];
  for (std::size_t i = 0; i < requests.size(); ++i)
    state.store->set(answer_key(requests[i].number), bytes_of(plan.text(plan.former_ranks + static_cast<int>(i))));
  c10::intrusive_ptr<Backend> next;
  std::string error;
  try {
    next = state.backend->connect_with_new(plan.rendezvous(state.store), group.rank(), plan.names);
  } catch (const Error& exception) {
    error = exception.what();
  }
  // If one rank has not connected, none uses the new group.
  const auto errors = group.all_gather_bytes(error);
  const auto failed = std::ranges::find_if(errors, [](const std::string& each) { return !each.empty(); });
  if (failed != errors.end()) {
    if (group.rank() == 0) std::fputs(fmt::format("[ddpkit] no new rank joins: {}\n", *failed).c_str(), stderr);
    plan.names.resize(static_cast<std::size_t>(plan.former_ranks));
    return plan.change();
  }
  state.continue_in(std::move(next));
  return plan.change();
}

Regroup Joining::join(const ProcessGroup& group) {
  ProcessGroup::State& state = *group.state_;
  EventRing& ring = EventRing::of_process();
  const std::string name = std::to_string(state.joining_name.value());
  for (;;) {
    try {
      const std::int64_t number = state.store->add(kRequests, 1);
      state.store->set(request_key(number), bytes_of(fmt::format("{} {}", name, ::getpid())));
      ring.set_phase(RankPhase::kJoining);
      while (!state.store->check({answer_key(number)})) std::this_thread::sleep_for(kPoll);
      Plan plan;
      const int rank = plan.read(text_of(state.store->get(answer_key(number))));
      state.continue_in(state.backend->connect_with_new(plan.rendezvous(state.store), rank, plan.names));
      state.generation = plan.generation;
      state.joining_name.reset();
      ring.set_phase(RankPhase::kTraining);
      return plan.change();
    } catch (const c10::Error& error) {
      throw RendezvousError(
          fmt::format("the run ended before rank {} could join it: {}", name, error.what_without_backtrace()),
          {.call = "rendezvous"});
    } catch (const RendezvousError&) {
      // Another new rank was lost. The others continue without new ranks, and this one asks again.
    } catch (const PeerLost&) {
      // The same.
    }
  }
}

void Joining::copy(const ProcessGroup& group, int new_ranks, const at::Tensor& tensor) {
  const int former = group.world_size() - new_ranks;
  for (int i = 0; i < new_ranks; ++i) {
    const int source = i % former;
    if (group.rank() == source) group.send(tensor, former + i);
    if (group.rank() == former + i) group.recv(tensor, source);
  }
}

}  // namespace ddpkit
