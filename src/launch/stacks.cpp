#include "launch/stacks.h"

#include <chrono>
#include <string>
#include <thread>

namespace ddpkit::launcher {
namespace {

using Clock = std::chrono::steady_clock;

/// Time limit for a rank to write its stack.
constexpr std::chrono::milliseconds kStackLimit(500);

}  // namespace

std::vector<HungRank> look_at(const std::vector<int>& ranks, std::vector<FlightView>& views,
                              const std::vector<RankProcess>& processes) {
  std::vector<bool> asked;
  for (const int rank : ranks) {
    const auto index = static_cast<std::size_t>(rank);
    asked.push_back(views[index].ask_for_stack(processes[index].pid()));
  }
  const auto deadline = Clock::now() + kStackLimit;
  const auto has_all_stacks = [&] {
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (asked[i] && !views[static_cast<std::size_t>(ranks[i])].has_stack()) return false;
    }
    return true;
  };
  while (!has_all_stacks() && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  std::vector<HungRank> result;
  for (const int rank : ranks) {
    const auto index = static_cast<std::size_t>(rank);
    const int pid = processes[index].pid();
    std::string stack = views[index].stack();
    if (stack.empty()) stack = stopped_text(pid);
    if (stack.empty()) stack = "printed no stack";
    views[index].sample();
    result.push_back({rank, pid, views[index].state(false), stack});
  }
  return result;
}

}  // namespace ddpkit::launcher
