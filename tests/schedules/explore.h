// Runs a scenario of the shared-memory engine under many schedules.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/shm/engine.h"
#include "simulation.h"

namespace ddpkit::schedules {

using Values = std::vector<std::int64_t>;

/// One rank of a scenario. A failed check is a fault of the schedule.
class ScenarioRank {
 public:
  const int rank;
  const int ranks;
  Simulation& simulation;
  std::unique_ptr<shm::Engine>& engine;
  std::shared_ptr<shm::SymmetricSegment> segment;  ///< Scenario::symmetric bytes.

  void check(bool holds, const std::string& what) {
    if (!holds) simulation.fail(what);
  }
  /// Returns rank `of`'s input for collective `number`. All ranks, collectives and elements have different values.
  static Values values(int of, int number, std::size_t numel);
  /// Returns the sum over all ranks.
  Values sum(int number, std::size_t numel) const;
};

/// Returns a message of int64 `values`. The caller keeps `values` alive until the message has finished.
shm::MessageHandle message(shm::Message::Kind kind, int peer, int tag, Values& values);

struct Scenario {
  int ranks = 2;
  /// Runs on each rank.
  std::function<void(ScenarioRank&)> body;
  /// Number of schedules, unless DDPKIT_SCHEDULES gives another number.
  int schedules = 1000;
  /// Symmetric memory that each rank allocates before the schedule begins, in bytes.
  std::size_t symmetric = 0;
  bool naps_expire = false;
  bool membarrier = true;
  std::chrono::milliseconds timeout = std::chrono::minutes(1);
  /// Whether the rendezvous is part of the schedules.
  bool explores_join = false;
};

/// Runs random schedules. Fails the test with the first fault and with the seed that reproduces it.
void explore(const std::string& name, const Scenario& scenario);
/// Runs all schedules with at most `deviations` preemptions and loads of older values.
void explore_all(const std::string& name, const Scenario& scenario, int deviations);
/// Runs random schedules in which `victim` dies, an equal number for each of its points. A survivor may fail with a
/// PeerLost that names the victim.
void explore_deaths(const std::string& name, const Scenario& scenario, int victim);

}  // namespace ddpkit::schedules
