// training_fuzzer: draws random trainings, compares ddpkit with one process, and shrinks failing cases. See README.md.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/train/options.h>

#include "known.h"
#include "pool.h"
#include "shrink.h"
#include "support/seed.h"

namespace {

using namespace ddpkit::fuzz;
using Clock = std::chrono::steady_clock;

struct Options {
  std::uint64_t cases = 0;
  std::uint64_t first = 0;
  std::optional<std::uint64_t> seed;
  double minutes = 0;
  std::string replay;
  std::string known;
  std::string feature;
  bool threads = false;
  bool print = false;
};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Does not shrink a fault that disappears in a second run: the smaller case might show another fault.
Case shrunk(Pool& pool, const Case& drawn, const Verdict& verdict) {
  return shrink(
      drawn, [&](const Case& one) { return pool.run(one).kind == verdict.kind; }, verdict.kind == "HANG" ? 40 : 250);
}

/// Returns whether the case also fails in new processes. A known fault that damages memory makes later cases of its
/// processes fail.
bool repeats(Pool& pool, const Case& drawn) {
  for (int tries = 0; tries < 3; ++tries) {
    pool.replace();
    if (pool.run(drawn).is_fault()) return true;
  }
  return false;
}

/// Replays stored cases: each must be right, or fail with its known verdict.
int replay(const Options& options) {
  Pool pool(options.threads);
  const auto start = Clock::now();
  const auto stored = read_stored(options.replay);
  int failures = 0;
  for (const StoredCase& one : stored) {
    Verdict verdict = pool.run(one.drawn);
    // A wrong read or free may go unnoticed in one run.
    for (int tries = 0; tries < 9 && !one.known.empty() && !verdict.is_fault(); ++tries) verdict = pool.run(one.drawn);
    const bool expected = one.known.empty() ? !verdict.is_fault() : is_known(one, verdict);
    if (expected && !options.print) continue;
    if (!expected) ++failures;
    if (!one.known.empty() && !verdict.is_fault())
      fmt::print("{}: is right now ({}): delete its \"known\"\n", one.name, verdict.kind);
    else
      fmt::print(
          "{}: {}{} {}\n", one.name, verdict.kind,
          one.known.empty() || expected ? "" : fmt::format(" instead of the known {}", fmt::join(one.known, " or ")),
          verdict.detail);
  }
  fmt::print("{} stored cases, {} not as expected, in {:.1f} s\n", stored.size(), failures, seconds_since(start));
  return failures == 0 ? 0 : 1;
}

int draw_and_run(const Options& options) {
  const std::uint64_t seed = options.seed ? *options.seed : ddpkit::testing::seed_of_this_run();
  fmt::print("training_fuzzer --seed {}\n", seed);
  std::fflush(stdout);
  const auto stored = options.known.empty() ? std::vector<StoredCase>() : read_stored(options.known);
  Pool pool(options.threads);
  const auto run = [&](const Case& one) { return pool.run(one); };
  const auto start = Clock::now();
  struct Known {
    std::uint64_t times = 0, first = 0;  ///< Number of the first case.
    double seconds = 0;                  ///< Seconds until the first case.
  };
  std::map<std::string, std::uint64_t> verdicts;
  std::map<std::string, Known> known;
  std::uint64_t number = options.first;
  const auto count_known = [&](const std::string& name) {
    Known& one = known[name];
    if (++one.times == 1) one = {.times = 1, .first = number, .seconds = seconds_since(start)};
  };
  std::uint64_t unknown = 0, not_repeated = 0, count = 0;
  for (; options.cases == 0 || number < options.first + options.cases; ++number) {
    if (options.minutes > 0 && seconds_since(start) > 60 * options.minutes) break;
    const Case drawn = draw(seed, number);
    if (!options.feature.empty() && !features(drawn).contains(options.feature)) continue;
    ++count;
    const Verdict verdict = pool.run(drawn);
    ++verdicts[verdict.kind];
    if (options.print) fmt::print("{} {} {}: {}\n", number, verdict.kind, verdict.detail, to_json(drawn).dump());
    if (!verdict.is_fault()) continue;
    if (const std::string name = explain(drawn, verdict, stored, run); !name.empty()) {
      count_known(name);
      continue;
    }
    if (!repeats(pool, drawn)) {
      ++not_repeated;
      fmt::print("case {} did not fail again in new processes: {} {}\n", number, verdict.kind, verdict.detail);
      continue;
    }
    const Case small = shrunk(pool, drawn, verdict);
    const Verdict again = pool.run(small);
    if (const std::string name = explain(small, again.is_fault() ? again : verdict, stored, run); !name.empty()) {
      count_known(name);
      continue;
    }
    ++unknown;
    fmt::print("case {} after {:.0f} s: {} {}\n  shrunk to {}\n  {} {}\n", number, seconds_since(start), verdict.kind,
               verdict.detail, nlohmann::json{{"known", {again.kind}}, {"case", to_json(small)}}.dump(), again.kind,
               again.detail);
    std::fflush(stdout);
  }
  fmt::print("{} cases in {:.0f} s ({:.0f} a minute):", count, seconds_since(start),
             60 * static_cast<double>(count) / seconds_since(start));
  for (const auto& [kind, times] : verdicts) fmt::print(" {} {}", times, kind);
  fmt::print("; {} unknown faults, {} not repeated\n", unknown, not_repeated);
  for (const auto& [name, one] : known)
    fmt::print("  {} times {}, first in case {} after {:.0f} s\n", one.times, name, one.first, one.seconds);
  // Variations of known faults still appear as unknown. A change that breaks training fails most cases.
  const bool has_known = std::any_of(stored.begin(), stored.end(), [](const auto& one) { return !one.known.empty(); });
  const std::uint64_t tolerated = has_known ? count / 100 : 0;
  if (tolerated > 0) fmt::print("{} unknown faults are tolerated while stored cases are marked as known\n", tolerated);
  return unknown <= tolerated ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  // The ranks share the cores. Must precede the first operator, so it applies to all ranks.
  ::setenv("OMP_NUM_THREADS", "1", 1);
  std::signal(SIGPIPE, SIG_IGN);
  Options options;
  ddpkit::train::Options app("training_fuzzer",
                             "Draws trainings and compares ddpkit's ranks with one process that plays all of them.");
  app.add("cases", &options.cases, "Cases to run; 0: until --minutes");
  app.add("first", &options.first, "Number of the first case");
  app.add("seed", &options.seed, "Seed of the cases; default: DDPKIT_TEST_SEED, or a new seed, which is printed");
  app.add("minutes", &options.minutes, "Stop after N minutes; 0: after the cases");
  app.add("replay", &options.replay, "Run a stored case, or a folder of them, instead");
  app.add("known", &options.known, "Folder of stored cases: faults that they explain are counted, not shrunk");
  app.add("feature", &options.feature, "Run only the cases with this feature, such as wrapper.kind=fsdp");
  app.add("threads", &options.threads, "Ranks are threads of one process, for ThreadSanitizer; all cases use shm");
  app.add("print", &options.print, "Print the verdict of each case");
  try {
    if (const std::string help = app.parse(argc, argv); !help.empty()) return std::fputs(help.c_str(), stdout), 0;
    if (!options.replay.empty()) return replay(options);
    if (options.cases == 0 && options.minutes == 0) options.cases = 100;
    return draw_and_run(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "training_fuzzer: {}\n", error.what());
    return 2;
  }
}
