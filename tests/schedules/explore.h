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

/// One rank of a scenario. A check that fails is a fault of the schedule.
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
  /// What rank `of` gives to collective `number`: no other rank, collective or element has the same values.
  static Values values(int of, int number, std::size_t numel);
  /// The sum over all ranks.
  Values sum(int number, std::size_t numel) const;
};

/// A message of int64 `values`, which live until it is finished.
shm::MessageHandle message(shm::Message::Kind kind, int peer, int tag, Values& values);

struct Scenario {
  int ranks = 2;
  /// What each rank does with its engine.
  std::function<void(ScenarioRank&)> body;
  /// Schedules if DDPKIT_SCHEDULES does not give another number.
  int schedules = 1000;
  /// Symmetric memory that each rank allocates before the schedule begins, in bytes.
  std::size_t symmetric = 0;
  bool naps_expire = false;
  std::chrono::milliseconds timeout = std::chrono::minutes(1);
  /// The rendezvous itself is part of the schedules.
  bool explores_join = false;
};

/// Random schedules. Fails the test with the first fault and the seed that repeats it.
void explore(const std::string& name, const Scenario& scenario);
/// All schedules with at most `deviations` preemptions and loads of older values.
void explore_all(const std::string& name, const Scenario& scenario, int deviations);
/// `victim` dies at each of its points. Random schedules, an equal number for each point. A survivor may fail with a
/// PeerLost that names the victim.
void explore_deaths(const std::string& name, const Scenario& scenario, int victim);

}  // namespace ddpkit::schedules
