#include "step_systems.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "python.h"
#include "rank.h"
#include "step_rank.h"
#include "workers.h"

namespace ddpkit::bench {
namespace {

/// A running system: one row of the table.
struct System {
  std::string name;
  std::string bucket_cap_mb;
  std::shared_ptr<Workers> workers;
  bool together = true;
  int ranks = 1;       ///< Processes that run at the same time.
  bool roams = false;  ///< Moves to another core after each turn.
};

/// The results of one system over all starts.
struct Measured {
  int steps = 0;  ///< Steps per turn; 0: not chosen yet.
  StepSeries series;
  std::vector<StepEnd> ends;  ///< One per rank and start.
};

/// Measures one model.
class ModelBench {
 public:
  ModelBench(const StepOptions& options, const std::string& model) : options_(options), model_(model) {}

  /// Returns nothing if a requested backend is not available.
  std::optional<std::vector<StepRow>> run() {
    const int starts = options_.starts, steps = options_.plan.steps;
    int rounds = std::max(kRounds, kRoundsAStart * starts);
    if (steps > 0) rounds = std::clamp(steps, starts, rounds);
    for (int start = 0; start < starts; ++start) {
      systems_.clear();  // The ranks of one start end before the next start.
      std::cerr << fmt::format("{}: starting the ranks{}\n", model_,
                               starts > 1 ? fmt::format(", {} of {} times", start + 1, starts) : "");
      if (!start_all()) return std::nullopt;
      measured_.resize(systems_.size());
      std::cerr << fmt::format("{}: warming up\n", model_);
      for (std::size_t i = 0; i < systems_.size(); ++i) warm_up(i, rounds);
      take_turns(start * rounds / starts, (start + 1) * rounds / starts, rounds);
      for (std::size_t i = 0; i < systems_.size(); ++i) take_ends(i);
    }
    std::vector<StepRow> rows;
    for (std::size_t i = 0; i < systems_.size(); ++i) rows.push_back(row_of(systems_[i], measured_[i]));
    return rows;
  }

 private:
  bool start_all() {
    const int ranks = options_.plan.ranks;
    const std::vector<std::string> updates = updates_of(options_.plan);
    const auto has = [&](const char* update) {
      return std::find(updates.begin(), updates.end(), update) != updates.end();
    };
    const auto alone = start_workers("alone", kAlone, kTorchUpdate, "default");
    systems_.push_back({.name = "alone", .bucket_cap_mb = "", .workers = alone, .together = false, .roams = true});
    if (options_.plan.activation_checkpoint && has_checkpoints(model_))
      systems_.push_back({.name = "alone-checkpointed",
                          .bucket_cap_mb = "",
                          .workers = start_workers("alone-checkpointed", kAlone, kTorchUpdate, "default", true),
                          .together = false,
                          .roams = true});
    const bool on_cpu = options_.plan.device == "cpu";
    // Independent processes: the cost of the memory bandwidth that CPU ranks share.
    if (on_cpu)
      systems_.push_back({.name = fmt::format("alone-x{}", ranks),
                          .bucket_cap_mb = "",
                          .workers = alone,
                          .together = false,
                          .ranks = ranks});
    // Measures the cost of waiting for the slower rank, without any exchange.
    if (on_cpu && std::find(options_.backends.begin(), options_.backends.end(), "shm") != options_.backends.end())
      systems_.push_back({.name = "alone-barrier",
                          .bucket_cap_mb = "",
                          .workers = start_workers("alone-barrier", kBarrier, kTorchUpdate, "default"),
                          .ranks = ranks});
    for (const char* update : {kFusedUpdate, kGraphedUpdate}) {
      if (!has(update)) continue;
      const std::string name = fmt::format("alone-{}", update);
      systems_.push_back({.name = name,
                          .bucket_cap_mb = "",
                          .workers = start_workers(name, kAlone, update, "default"),
                          .together = false,
                          .roams = true});
    }
    for (const std::string& backend : options_.backends) {
      for (const std::string& update : updates) {
        if (!start_ranks(backend, update)) return false;
      }
    }
    if (options_.peers) start_python(has(kFsdpUpdate));
    return true;
  }

  /// Returns false if a requested backend is not available.
  bool start_ranks(const std::string& backend, const std::string& update) {
    const std::string name = "ddpkit-" + backend + (update == kTorchUpdate ? "" : "-" + update);
    // FullyShardedDataParallel has a bucket per unit.
    const auto caps = update == kFsdpUpdate ? std::vector<std::string>{"default"} : options_.plan.bucket_caps_mb;
    for (const std::string& cap : caps) {
      try {
        systems_.push_back({.name = name,
                            .bucket_cap_mb = cap,
                            .workers = start_workers(name, backend, update, cap),
                            .ranks = options_.plan.ranks});
      } catch (const NoBackend& error) {
        std::cerr << fmt::format("ddpkit bench: {} skipped: {}\n", backend, error.what());
        return !options_.backends_asked_for;
      }
    }
    return true;
  }

  void start_python(bool sharded) {
    std::vector<std::string> common = python_command("step.py");
    const std::vector<std::string> arguments = to_arguments(options_.plan, model_);
    common.insert(common.end(), arguments.begin(), arguments.end());
    const auto with = [&](const std::vector<std::string>& more) {
      std::vector<std::string> command = common;
      command.insert(command.end(), more.begin(), more.end());
      return command;
    };
    const auto start = [&](const std::string& name, const std::vector<std::string>& command) {
      systems_.push_back({.name = name,
                          .bucket_cap_mb = "default",
                          .workers = start_workers(name, command),
                          .ranks = options_.plan.ranks});
    };
    const bool on_cpu = options_.plan.device == "cpu";
    start(python_ddp(options_.plan), common);
    if (const std::string package = python_package(); on_cpu && !package.empty())
      start("python-ddp-shm", with({"--package", package}));
    // FSDP2 does not support nn.LSTM, which keeps a list of its weights.
    if (sharded && on_cpu && model_ != "lstm") start("python-fsdp-gloo", with({"--fsdp"}));
    const std::string name = "python-alone";
    systems_.push_back({.name = name,
                        .bucket_cap_mb = "",
                        .workers = start_workers(name, with({"--alone"})),
                        .together = false,
                        .roams = true});
  }

  std::shared_ptr<Workers> start_workers(const std::string& name, const std::string& backend, const std::string& update,
                                         const std::string& cap, bool checkpoint = false) const {
    std::vector<std::string> command = {std::filesystem::read_symlink("/proc/self/exe").string(),
                                        "bench",
                                        "step",
                                        "--as-rank",
                                        backend,
                                        "--bucket-cap-mb",
                                        cap,
                                        "--update",
                                        update};
    const std::vector<std::string> arguments = to_arguments(options_.plan, model_);
    command.insert(command.end(), arguments.begin(), arguments.end());
    if (checkpoint) command.emplace_back("--activation-checkpoint");
    return start_workers(name, command);
  }

  std::shared_ptr<Workers> start_workers(const std::string& name, const std::vector<std::string>& command) const {
    return std::make_shared<Workers>(Workers::Options{.system = name,
                                                      .command = command,
                                                      .ranks = options_.plan.ranks,
                                                      .answer_prefix = std::string(kStepReport),
                                                      .no_backend_prefix = std::string(kReason)});
  }

  /// Runs a turn that is not counted. Also chooses the number of steps per turn.
  void warm_up(std::size_t i, int rounds) {
    const System& system = systems_[i];
    int& steps = measured_[i].steps;
    if (options_.plan.steps > 0) {
      steps = (options_.plan.steps + rounds - 1) / rounds;
      turn(system, 0, 1, 1);
      return;
    }
    const auto measured_us = [&](int warmup, int count) {
      StepSeries series;
      series.add_turn(turn(system, 0, warmup, count), system.together);
      return series.us();
    };
    const auto fill = [](double us) { return std::clamp(static_cast<int>(kTurnSeconds * 1e6 / us), 2, 2000); };
    const bool is_first = steps == 0;
    const int guess = is_first ? fill(measured_us(2, 3)) : steps;
    const double us = measured_us(1, guess);
    if (is_first) steps = fill(us);
  }

  /// Runs the rounds [begin, end).
  void take_turns(int begin, int end, int rounds) {
    std::cerr << fmt::format("{}: {} systems take turns in {} rounds\n", model_, systems_.size(), end - begin);
    const bool is_terminal = ::isatty(STDERR_FILENO) != 0;
    for (int round = begin; round < end; ++round) {
      if (is_terminal) std::cerr << fmt::format("{}: round {} of {}\r", model_, round + 1, rounds);
      // The order rotates, so no system always follows the same system.
      for (std::size_t i = 0; i < systems_.size(); ++i) {
        const std::size_t next = (i + static_cast<std::size_t>(round)) % systems_.size();
        const System& system = systems_[next];
        Measured& measured = measured_[next];
        const int warmup = std::clamp(measured.steps / 10, 1, 20);
        measured.series.add_turn(turn(system, round, warmup, measured.steps), system.together);
      }
    }
  }

  static std::vector<StepTurn> turn(const System& system, int round, int warmup, int steps) {
    const int first = system.roams ? round % system.workers->ranks() : 0;
    std::vector<StepTurn> turns;
    for (const std::string& line : system.workers->ask(fmt::format("turn {} {}", warmup, steps), first, system.ranks)) {
      const auto answer = parse_step_turn(line);
      if (!answer || answer->us.size() != static_cast<std::size_t>(steps))
        throw Error(fmt::format("{} answered \"{}\" when asked for {} steps", system.name, line, steps));
      turns.push_back(*answer);
    }
    return turns;
  }

  void take_ends(std::size_t i) {
    for (const std::string& line : systems_[i].workers->ask_all("end")) {
      const auto end = parse_step_end(line);
      if (!end) throw Error(fmt::format("{} answered \"{}\" when asked for its end", systems_[i].name, line));
      measured_[i].ends.push_back(*end);
    }
  }

  StepRow row_of(const System& system, const Measured& measured) const {
    return {.system = system.name,
            .model = model_,
            .optimizer = options_.plan.optimizer,
            .batch = options_.plan.batch,
            .ranks = system.ranks,
            .bucket_cap_mb = system.bucket_cap_mb,
            .us = measured.series.us(),
            .ratio_to_alone = measured.series.ratio_to(measured_[0].series),
            .exposed_us = measured.series.exposed_us(),
            .end = over_ranks(measured.ends)};
  }

  const StepOptions& options_;
  std::string model_;
  std::vector<System> systems_;     ///< Systems of the current start.
  std::vector<Measured> measured_;  ///< [system]
};

}  // namespace

std::string python_ddp(const StepPlan& plan) { return plan.device == "cpu" ? "python-ddp-gloo" : "python-ddp-nccl"; }

std::optional<std::vector<StepRow>> bench_step_of(const std::string& model, const StepOptions& options) {
  return ModelBench(options, model).run();
}

}  // namespace ddpkit::bench
