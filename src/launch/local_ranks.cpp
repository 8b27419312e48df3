#include "launch/local_ranks.h"

#include <algorithm>
#include <string>
#include <utility>

#include "comm/host.h"
#include "launch/numa_binding.h"

namespace ddpkit::launcher {

LocalRanks::LocalRanks(const LaunchOptions& options, RankOutput& output)
    : options_(options),
      output_(output),
      cores_(divide_cores(numa_nodes(allowed_cores()), options.ranks, options.numa_binding)) {}

void LocalRanks::start(std::size_t rank, int port, int pass) {
  const bool replaces = rank < processes.size();
  FlightView view;
  const RankOutput::Ends ends = output_.open(static_cast<int>(rank), replaces);
  const std::vector<std::string> environment =
      rank_environment(options_, static_cast<int>(rank), port, view.descriptor(), pass, replaces);
  try {
    RankProcess process(RankStart{.command = options_.command,
                                  .environment = environment,
                                  .in = ends.in,
                                  .out = ends.out,
                                  .err = ends.err,
                                  .inherited = {view.descriptor(), pass},
                                  .cores = cores_[rank],
                                  .reaper = ends.has_terminal ? -1 : reaper_.descriptor()});
    ends_.add(process.descriptor(), rank);
    if (replaces) {
      views[rank] = std::move(view);
      processes[rank] = std::move(process);
      replaced_[rank] = true;
    } else {
      views.push_back(std::move(view));
      processes.push_back(std::move(process));
      replaced_.push_back(false);
    }
  } catch (...) {
    output_.close_ends(ends);
    throw;
  }
  output_.close_ends(ends);
}

int LocalRanks::running() const {
  return static_cast<int>(std::ranges::count_if(processes, [](const auto& process) { return process.running(); }));
}

int LocalRanks::running_inside() const {
  int ranks = 0;
  for (std::size_t rank = 0; rank < processes.size(); ++rank)
    ranks += processes[rank].running() && !is_outside(rank) ? 1 : 0;
  return ranks;
}

bool LocalRanks::announce_replacements() {
  const auto waiting = static_cast<int>(std::ranges::count_if(views, &FlightView::is_joining));
  for (FlightView& view : views) view.set_joining(waiting);
  return running_inside() > 0;
}

bool LocalRanks::sees_ends() const {
  return std::ranges::all_of(processes,
                             [](const auto& process) { return !process.running() || process.descriptor() >= 0; });
}

std::vector<std::size_t> LocalRanks::ended() const {
  std::vector<std::size_t> ranks = ends_.ended();
  for (std::size_t rank = 0; rank < processes.size(); ++rank) {
    if (processes[rank].descriptor() < 0) ranks.push_back(rank);  // The process may have ended.
  }
  return ranks;
}

bool LocalRanks::has_ended(std::size_t rank, int& exit_code, int& signal) {
  if (!processes[rank].has_ended(exit_code, signal)) return false;
  ends_.remove(processes[rank].descriptor());
  return true;
}

void LocalRanks::release(std::size_t rank) {
  reaper_.remove(processes[rank].pid());
  processes[rank].release();
}

}  // namespace ddpkit::launcher
