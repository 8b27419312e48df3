// Runs the clstm_ppo trainer on one rank and on several ranks, alternating. `script/bench clstm_ppo` runs this. Each
// rank runs and learns from the same number of episodes, so an update has N times as many episodes with N ranks.
#include <filesystem>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/comm/environment.h>
#include <ddpkit/train/main.h>

#include "bench/ratios.h"
#include "bench/timing.h"
#include "clstm_ppo/generate.h"
#include "trainer_program.h"

namespace {

struct Options {
  std::string program;
  int ranks = 2;
  int rounds = 3;
  int updates = 6;
};

// Episodes per second of each round, without the first round of a run.
std::vector<double> run(const Options& options, const std::string& data, int ranks) {
  constexpr int kEpisodes = 32;
  std::vector<std::string> command = {options.program,
                                      "--data",
                                      data,
                                      "--test-share",
                                      "0.05",
                                      "--envs",
                                      std::to_string(kEpisodes),
                                      "--num-episodes",
                                      std::to_string(kEpisodes * ranks * (options.updates + 1)),
                                      "--lr",
                                      "2e-3",
                                      "--no-save",
                                      "--json"};
  std::vector<double> rates;
  int round = 0;
  for (const auto& json : ddpkit::bench::run_trainer(ddpkit::bench::on_own_core(std::move(command), ranks), ranks)) {
    if (json.contains("episodes_per_second") && ++round > 1) rates.push_back(json["episodes_per_second"]);
  }
  return rates;
}

void measure(const Options& options) {
  const ddpkit::bench::TemporaryData data("clstm-ppo");
  clstm_ppo::generate(data.path(), {});
  std::vector<double> alone, together;
  for (int round = 0; round < options.rounds; ++round) {
    fmt::print(stderr, "round {}/{}\n", round + 1, options.rounds);
    for (const double rate : run(options, data.path(), 1)) alone.push_back(rate);
    for (const double rate : run(options, data.path(), options.ranks)) together.push_back(rate);
  }
  const double one = ddpkit::bench::median(alone), all = ddpkit::bench::median(together);
  fmt::print("| ranks | episodes/s | speed-up | efficiency |\n| ---: | ---: | ---: | ---: |\n");
  fmt::print("| 1 | {:.1f} | | |\n", one);
  fmt::print("| {} | {:.1f} | {:.2f}x | {:.0f} % |\n", options.ranks, all, all / one, 100 * all / one / options.ranks);
  if (options.ranks <= ddpkit::available_cores())
    ddpkit::bench::note_ratio(fmt::format("clstm_ppo: time of an episode over one rank's, {} ranks", options.ranks),
                              one / all);
}

}  // namespace

int main(int argc, char** argv) {
  ddpkit::train::Options app("bench_clstm_ppo", "The clstm_ppo trainer on one rank and on several.");
  Options options;
  options.program = std::filesystem::path(argv[0]).parent_path() / "clstm_ppo";
  app.add("ranks", &options.ranks, "Ranks").between(2, 1024);
  app.add("rounds", &options.rounds, "Runs of each").between(1, 1000);
  app.add("updates", &options.updates, "Timed rounds of episodes and learning in a run").between(1, 1 << 20);
  return ddpkit::train::run_main(app, argc, argv, [&](ddpkit::train::Program&) { measure(options); });
}
