#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>
#include <set>
#include <tuple>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/comm/environment.h>
#include <ddpkit/error.h>
#include <ddpkit/launch/launcher.h>

#include "bench/device.h"
#include "bench/limit.h"
#include "bench/plan.h"
#include "bench/plot.h"
#include "bench/rank.h"
#include "bench/row.h"
#include "commands.h"
#include "output_file.h"

namespace ddpkit::cli {
namespace {

using namespace bench;

/// Each has a program of benchmarks/mpi_collectives.cpp, in the folder of ddpkit.
const std::vector<std::string> kLibraries = {"openmpi", "mpich", "intelmpi", "oneccl"};

bool is_library(const std::string& backend) {
  return std::find(kLibraries.begin(), kLibraries.end(), backend) != kLibraries.end();
}

std::filesystem::path own_program() { return std::filesystem::read_symlink("/proc/self/exe"); }

struct CollectivesOptions {
  Plan plan;
  std::vector<int> ranks = {};             ///< Empty: ranks_on() the device.
  std::vector<std::string> backends = {};  ///< Empty: all backends of the device.
  bool backends_asked_for = false;
  bool batch_asked_for = false;
  int rounds = 1;
  std::string csv;
  std::string plot;
  std::string as_rank;  ///< Hidden option: this process is one of the ranks, with this backend.
};

/// Derives defaults from the other options.
void complete(CollectivesOptions& options) {
  const std::string& device = options.plan.device;
  const bool on_cpu = device == "cpu";
  if (options.ranks.empty()) options.ranks = {ranks_on(device, 0)};
  for (const int ranks : options.ranks) {
    ranks_on(device, ranks);
    // One GPU shows the cost of a call. One CPU rank shares memory with no other rank.
    if (on_cpu && ranks < 2) throw InvalidArgument("--nproc-per-node: at least 2 on the CPU");
  }
  if (options.backends.empty()) {
    options.backends = on_cpu ? std::vector<std::string>{"shm", "gloo"} : std::vector<std::string>{"nccl"};
    if (on_cpu) {
      options.backends.insert(options.backends.end(), kLibraries.begin(), kLibraries.end());
      options.backends.emplace_back("limit");
    }
  }
  for (const std::string& backend : options.backends) {
    if (on_cpu == (backend == "nccl"))
      throw InvalidArgument(fmt::format("--backend {} has no use for --device {}", backend, device));
  }
}

void check(CollectivesOptions& options) {
  const std::vector<std::string> known = group_collectives();
  if (options.plan.collectives.empty()) options.plan.collectives = known;
  for (const std::string& name : options.plan.collectives) {
    if (std::find(known.begin(), known.end(), name) == known.end())
      throw InvalidArgument(fmt::format("there is no collective \"{}\"; there are {}", name, fmt::join(known, ", ")));
  }
  options.plan.sizes();
  if (!options.plot.empty() && !options.plot.ends_with(".svg"))
    throw InvalidArgument(
        fmt::format("--plot draws SVG only: name a file that ends in .svg, not \"{}\"", options.plot));
  for (const std::string& path : {options.csv, options.plot}) {
    if (path.empty()) continue;
    check_output(path);
  }
}

/// Runs the measurements and keeps the best result of each row over all rounds.
class Bench {
 public:
  explicit Bench(const CollectivesOptions& options) : options_(options) {}

  int run() {
    std::cout << table_header() << std::endl;
    // Backends take turns, so a disturbance of the machine affects all backends.
    for (int round = 1; round <= options_.rounds; ++round) {
      if (options_.rounds > 1) std::cerr << fmt::format("round {} of {}\n", round, options_.rounds);
      for (const int ranks : options_.ranks) {
        for (const std::string& backend : options_.backends) {
          const int code = measure(ranks, backend);
          if (code != 0) return code;
        }
      }
    }
    if (options_.rounds > 1) std::for_each(rows_.begin(), rows_.end(), [this](const Row& row) { print(row); });
    if (!options_.csv.empty()) write_output(options_.csv, csv_);
    if (!options_.plot.empty()) write_output(options_.plot, draw_log_log(panels_of(rows_), "bus bandwidth, GB/s"));
    std::uint64_t wrong = 0;
    for (const Row& row : rows_) wrong += row.wrong;
    if (wrong > 0) std::cerr << "ddpkit bench: " << wrong << " elements had a wrong value: see the column #wrong\n";
    return wrong > 0 ? 1 : 0;
  }

 private:
  int measure(int ranks, const std::string& backend) {
    const auto& asked = options_.plan.collectives;
    if (backend == "limit" && std::find(asked.begin(), asked.end(), "all_reduce") == asked.end()) return 0;
    const std::filesystem::path library = own_program().replace_filename(backend + "_collectives");
    if (is_library(backend) && ::access(library.c_str(), X_OK) != 0)
      return skip(backend, fmt::format("this build has no {}: run script/bootstrap --peers, then build again",
                                       library.filename().string()));
    if (backend == "mpich" && ranks > available_cores())
      return skip(backend,
                  fmt::format("its ranks do not yield while they wait, so {} on {} cores take minutes per call", ranks,
                              available_cores()));
    log_start(ranks, backend);
    if (backend == "limit") {
      measure_limit(ranks, options_.plan, [this](const Row& row) { take(row); });
      return 0;
    }
    Plan plan = options_.plan;
    // With more ranks than cores, a batch must be longer than the time slice of each rank. Otherwise the median misses
    // the waiting time.
    if (ranks > available_cores() && !options_.batch_asked_for) plan.timing.batch_us = 20'000;
    if (is_library(backend)) return launch(1, backend, {library.string(), "--launch", std::to_string(ranks)}, plan);
    const std::vector<std::string> command = {own_program().string(), "bench", "collectives", "--as-rank", backend};
    if (backend == "gloo" && !plan.no_pin && ranks <= available_cores()) {
      // Gloo's threads may need a core that a pinned rank does not leave: the better figure of both counts.
      Plan unpinned = plan;
      unpinned.no_pin = true;
      prints_ = false;
      const int code = launch(ranks, backend, command, unpinned);
      prints_ = true;
      if (code != 0) return code;
    }
    return launch(ranks, backend, command, plan);
  }

  static void log_start(int ranks, const std::string& backend) {
    std::cerr << fmt::format("measuring {} on {} rank{}\n", backend, ranks, ranks == 1 ? "" : "s");
    if (backend != "nccl" && ranks > available_cores())
      std::cerr << fmt::format("  (on {} cores: ranks share cores)\n", available_cores());
  }

  /// A missing backend is an error only if it was requested by name. Logs the reason in one round only.
  int skip(const std::string& backend, const std::string& reason) {
    if (skipped_.insert(backend).second) std::cerr << fmt::format("ddpkit bench: {} skipped: {}\n", backend, reason);
    return options_.backends_asked_for && !is_library(backend) ? 2 : 0;
  }

  int launch(int ranks, const std::string& backend, std::vector<std::string> command, const Plan& plan) {
    const std::vector<std::string> arguments = to_arguments(plan);
    command.insert(command.end(), arguments.begin(), arguments.end());
    std::vector<std::string> pending(static_cast<std::size_t>(ranks));
    std::string reason;
    const auto take_line = [&](int rank, const std::string& line) {
      if (line.starts_with(kReason))
        reason = line.substr(kReason.size());
      else if (const auto row = parse_report(line))
        take(*row);
      else if (!line.empty() && !line.starts_with(kCsvHeader))
        std::cerr << fmt::format("[rank {}] {}\n", rank, line);
    };
    const LaunchResult result = ddpkit::launch(
        {.command = command,
         .ranks = ranks,
         .environment = {{"OMP_NUM_THREADS", "1"}},
         .on_output =
             [&](int rank, const std::string& text) {
               std::string& lines = pending[static_cast<std::size_t>(rank)];
               lines += text;
               for (std::size_t end; (end = lines.find('\n')) != std::string::npos; lines.erase(0, end + 1))
                 take_line(rank, lines.substr(0, end));
             },
         .forward_signals = true});
    for (int rank = 0; rank < ranks; ++rank) take_line(rank, pending[static_cast<std::size_t>(rank)]);
    if (!reason.empty()) return skip(backend, reason);
    if (result.first_failure)
      std::cerr << fmt::format("ddpkit bench: {}: rank {} {}\n", backend, result.first_failure->rank,
                               result.first_failure->describe());
    return result.exit_code();
  }

  void take(const Row& row) {
    auto best = std::find_if(rows_.begin(), rows_.end(), [&](const Row& other) { return same_case(row, other); });
    if (best == rows_.end()) {
      best = rows_.insert(rows_.end(), row);
    } else {
      best->us = std::min(best->us, row.us);
      best->wrong += row.wrong;
    }
    if (options_.rounds == 1 && prints_) print(*best);
  }

  void print(const Row& row) {
    std::cout << table_row(row) << std::endl;
    csv_ += to_csv(row) + "\n";
  }

  static bool same_case(const Row& a, const Row& b) {
    return std::tie(a.collective, a.backend, a.ranks, a.bytes, a.memory) ==
           std::tie(b.collective, b.backend, b.ranks, b.bytes, b.memory);
  }

  const CollectivesOptions& options_;
  std::string csv_ = std::string(kCsvHeader) + "\n";
  std::vector<Row> rows_;
  std::set<std::string> skipped_;
  bool prints_ = true;  ///< With one round: each row as it is measured.
};

}  // namespace

void add_bench_collectives(train::Options& bench, Commands& commands) {
  train::Options& command = bench.command("collectives", "Time and bandwidth of each collective with each backend");
  command.epilog(
      "Starts one process per rank and pins each rank to one core if there are enough cores.\n"
      "Checks the result of each size before and after timing. #wrong counts wrong elements; if there are any, the\n"
      "exit code is 1. docs/benchmarks.md explains the columns.");
  auto shared = std::make_shared<CollectivesOptions>();
  CollectivesOptions& options = *shared;
  command.add("nproc_per_node", &options.ranks, "Numbers of ranks (default: 2; with --device cuda, one on each GPU)")
      .between(1, 4096)
      .also("n")
      .also("ranks");
  command
      .add("backend", &options.backends,
           "shm, gloo, openmpi, mpich, intelmpi, oneccl, limit (only the memory traffic); on GPUs nccl (default: all "
           "available)")
      .one_of({"shm", "gloo", "openmpi", "mpich", "intelmpi", "oneccl", "limit", "nccl"});
  declare(command, options.plan);
  command
      .add("rounds", &options.rounds,
           "Measure N times, with the backends in turns, and keep the best result of each row")
      .between(1, 1000);
  command.add("csv", &options.csv, "Also write the rows to this file, after the last measurement");
  command.add("plot", &options.plot, "Draw bus bandwidth over size to this file (SVG)");
  command.add("as_rank", &options.as_rank, "").hidden();
  commands.emplace_back(&command, [shared, &command] {
    CollectivesOptions& options = *shared;
    options.backends_asked_for = command.is_given("backend");
    options.batch_asked_for = command.is_given("batch_us");
    try {
      if (options.as_rank.empty()) complete(options);
      check(options);
    } catch (const InvalidArgument& error) {
      throw train::UsageError(error.what());
    }
    return options.as_rank.empty() ? Bench(options).run() : run_rank(options.as_rank, options.plan);
  });
}

}  // namespace ddpkit::cli
