#include "explore.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <stdexcept>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "support/catch.h"
#include "world.h"

namespace ddpkit::schedules {
namespace {

using shm::Engine;
using shm::Mapping;

struct Result {
  std::string fault;
  std::uint64_t points = 0;  ///< Of all ranks.
  std::uint64_t victim_points = 0;
  std::uint64_t switches = 0;
  std::uint64_t stale_loads = 0;
};

/// Sums over schedules.
struct Totals {
  std::uint64_t schedules = 0, most_points = 0, switches = 0, stale_loads = 0;
  void add(const Result& result) {
    ++schedules;
    most_points = std::max(most_points, result.points);
    switches += result.switches;
    stale_loads += result.stale_loads;
  }
  void print(const std::string& name, const std::string& method) const {
    const auto average = [&](std::uint64_t sum) { return static_cast<double>(sum) / static_cast<double>(schedules); };
    std::cout << fmt::format(
                     "{}: {} schedules ({}), at most {} points, on average {:.0f} switches and {:.2f} stale loads\n",
                     name, schedules, method, most_points, average(switches), average(stale_loads))
              << std::flush;
  }
};

std::uint64_t number_in_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

Result run_once(const Scenario& scenario, Strategy& strategy, std::optional<Death> death = {}) {
  if (scenario.ranks > kMaxRanks) throw std::invalid_argument("a scenario has more than kMaxRanks ranks");
  const std::size_t control_bytes = shm::control_bytes(scenario.ranks);
  const Mapping control = shm::create_control(scenario.ranks);
  std::vector<int> pids;
  for (int r = 0; r < scenario.ranks; ++r) pids.push_back(kFirstPid + r);
  std::vector<std::unique_ptr<Engine>> engines(pids.size());
  std::unique_ptr<Simulation> simulation;
  const auto run_rank = [&](int r) {
    try {
      auto& engine = engines[static_cast<std::size_t>(r)];
      if (scenario.explores_join) simulation->start();
      engine = std::make_unique<Engine>(Mapping::open({.rank = 0, .pid = pids[0]}, control.descriptor(), control_bytes),
                                        r, pids, scenario.timeout);
      ScenarioRank rank{r, scenario.ranks, *simulation, engine, {}};
      if (scenario.symmetric != 0) rank.segment = engine->allocate(scenario.symmetric);
      if (!scenario.explores_join) simulation->start();
      scenario.body(rank);
    } catch (const PeerLost& error) {
      // A survivor may get this error instead of its results.
      if (!death || error.context().rank != death->rank || !simulation->is_dead(death->rank))
        simulation->fail(fmt::format("unexpected error: {}", error.what()));
    } catch (const std::exception& error) {
      simulation->fail(fmt::format("unexpected error: {}", error.what()));
    }
  };
  simulation = std::make_unique<Simulation>(Simulation::Options{.ranks = scenario.ranks,
                                                                .strategy = &strategy,
                                                                .death = death,
                                                                .naps_expire = scenario.naps_expire,
                                                                .membarrier = scenario.membarrier},
                                            run_rank);
  Result result{.fault = simulation->run()};
  for (int r = 0; r < scenario.ranks; ++r) {
    result.points += simulation->points(r);
    if (death && death->rank == r) result.victim_points = simulation->points(r);
    auto& engine = engines[static_cast<std::size_t>(r)];
    if (!engine || (result.fault.empty() && !simulation->is_dead(r))) continue;
    // The fiber ended inside the engine, so the engine can be neither used nor destroyed.
    (void)engine.release();
  }
  result.switches = simulation->switches();
  result.stale_loads = simulation->memory().stale_loads();
  engines.clear();
  simulation->memory().clear();
  std::memset(control.data(), 0, control_bytes);
  forget_memory();
  return result;
}

/// Counts the points of the schedule without preemptions.
Result run_in_turn(const std::string& name, const Scenario& scenario, std::optional<Death> death = {}) {
  InTurn in_turn;
  const Result result = run_once(scenario, in_turn, death);
  if (!result.fault.empty()) FAIL(name << ", without preemptions: " << result.fault);
  return result;
}

/// Seeds: half are the same in every run, the other half are new. All depend on DDPKIT_TEST_SEED if it is set.
class Seeds {
 public:
  explicit Seeds(std::uint64_t count)
      : half_(count / 2), first_(number_in_environment("DDPKIT_TEST_SEED", 1)), new_(first_ + half_) {
    if (!std::getenv("DDPKIT_TEST_SEED")) new_ = std::random_device()() & ~std::uint64_t{1};
  }
  std::uint64_t operator[](std::uint64_t i) const { return i < half_ ? first_ + i : new_ + (i - half_); }
  std::string text() const {
    return fmt::format("PCT of depth 3 and random switches, seeds from {} and {}", first_, new_);
  }

 private:
  std::uint64_t half_, first_, new_;
};

}  // namespace

Values ScenarioRank::values(int of, int number, std::size_t numel) {
  Values values(numel);
  for (std::size_t i = 0; i < numel; ++i)
    values[i] = (of + 1) * 1'000'003LL + number * 7'000'009LL + static_cast<std::int64_t>(i) * 101;
  return values;
}

Values ScenarioRank::sum(int number, std::size_t numel) const {
  Values sum(numel);
  for (int r = 0; r < ranks; ++r) {
    const Values part = values(r, number, numel);
    for (std::size_t i = 0; i < numel; ++i) sum[i] += part[i];
  }
  return sum;
}

void explore(const std::string& name, const Scenario& scenario) {
  const std::uint64_t points = run_in_turn(name, scenario).points;
  const auto count = number_in_environment("DDPKIT_SCHEDULES", static_cast<std::uint64_t>(scenario.schedules));
  const Seeds seeds(count);
  Totals totals;
  for (std::uint64_t i = 0; i < count; ++i) {
    Random random(seeds[i], points);
    const Result result = run_once(scenario, random);
    if (!result.fault.empty())
      FAIL(name << ": " << result.fault << "\nrepeat by DDPKIT_TEST_SEED=" << seeds[i] << " DDPKIT_SCHEDULES=1");
    totals.add(result);
  }
  totals.print(name, seeds.text());
}

shm::MessageHandle message(shm::Message::Kind kind, int peer, int tag, Values& values) {
  auto result = std::make_shared<shm::Message>();
  result->kind = kind;
  result->peer = peer;
  result->tag = tag;
  result->dtype = shm::DataType::kInt64;
  result->numel = values.size();
  result->data = reinterpret_cast<std::byte*>(values.data());
  return result;
}

void explore_all(const std::string& name, const Scenario& scenario, int deviations) {
  Exhaustive exhaustive(deviations);
  Totals totals;
  while (exhaustive.next()) {
    const Result result = run_once(scenario, exhaustive);
    if (!result.fault.empty()) FAIL(name << ", schedule " << totals.schedules << ": " << result.fault);
    totals.add(result);
  }
  totals.print(name, fmt::format("all with at most {} preemptions or stale loads", deviations));
}

void explore_deaths(const std::string& name, const Scenario& scenario, int victim) {
  constexpr auto kNever = ~std::uint64_t{0};
  const Result alive = run_in_turn(name, scenario, Death{victim, kNever});
  const auto count = number_in_environment("DDPKIT_SCHEDULES", static_cast<std::uint64_t>(scenario.schedules));
  const Seeds seeds(count);
  Totals totals;
  for (std::uint64_t i = 0; i < count; ++i) {
    // Some schedules have more points than the schedule without preemptions.
    const std::uint64_t point = seeds[i] / 2 % (alive.victim_points + alive.victim_points / 4 + 1);
    Random random(seeds[i], alive.points);
    const Result result = run_once(scenario, random, Death{victim, point});
    if (!result.fault.empty())
      FAIL(name << ", rank " << victim << " dies at its point " << point << ": " << result.fault
                << "\nrepeat by DDPKIT_TEST_SEED=" << seeds[i] << " DDPKIT_SCHEDULES=1");
    totals.add(result);
  }
  totals.print(name, fmt::format("death at each of {} points, {}", alive.victim_points, seeds.text()));
}

}  // namespace ddpkit::schedules
