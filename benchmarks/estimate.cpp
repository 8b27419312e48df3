// Measures the error of `ddpkit estimate`. Records the timeline of one rank and the time of exchanging fresh gradients,
// and predicts the step of two ranks on shared memory. Then measures that step.
//
//   bench_estimate [--model NAME,...] [--rounds N] [--csv FILE]
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <sstream>

#include <fmt/format.h>

#include <ddpkit/comm/environment.h>
#include <ddpkit/error.h>
#include <ddpkit/launch/launcher.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/scaling/estimate.h>
#include <ddpkit/train/options.h>

#include "bench/step_models.h"
#include "bench/timing.h"
#include "estimate/profile_file.h"

namespace {

using ddpkit::Error;
using ddpkit::ProcessGroup;
using ddpkit::bench::median;
using ddpkit::bench::microseconds;
using ddpkit::scaling::AllReducePoint;
using Clock = std::chrono::steady_clock;

constexpr int kRanks = 2;
constexpr const char* kAnswer = "bench_estimate: ";
constexpr double kSecondsARun = 3;

/// Prints a number for the parent process.
void answer(const std::string& text) { std::cout << kAnswer << text << std::endl; }

/// Runs one rank of a training under DistributedDataParallel. Rank 0 prints the median time of a step.
void train_rank(const ProcessGroup& group, const std::string& model, const std::string& timeline) {
  auto task = ddpkit::bench::make_step_task(model, 32, group.rank());
  ddpkit::DistributedDataParallel ddp(task.model, group);
  auto optimizer = ddpkit::bench::make_step_optimizer("sgd", "torch", task.model->parameters());
  const auto step = [&] {
    optimizer.zero_grad();
    torch::cross_entropy_loss(ddp(task.input), task.target).backward();
    optimizer.step();
  };
  for (int i = 0; i < 20; ++i) step();
  // The same number on all ranks.
  const auto begin = Clock::now();
  for (int i = 0; i < 10; ++i) step();
  at::Tensor steps = torch::tensor(std::clamp(kSecondsARun * 1e7 / microseconds(Clock::now() - begin), 30., 5000.));
  group.broadcast(steps);
  std::optional<ddpkit::Timeline> recorded;
  if (!timeline.empty()) ddp.set_timeline(recorded.emplace(group, timeline));
  std::vector<double> times;
  for (auto before = Clock::now(); times.size() < static_cast<std::size_t>(steps.item<double>());) {
    step();
    const auto now = Clock::now();
    times.push_back(microseconds(now - before));
    before = now;
  }
  if (recorded) recorded->write();
  if (group.rank() == 0) answer(fmt::format("{}", median(times)));
}

/// Measures the time that the exchange of fresh gradients adds to a step that computes and uses them. A rank has its
/// own gradients in its cache, but not the sums that its peer has written. Prints a table of bytes and microseconds.
void exchange_rank(const ProcessGroup& group) {
  std::string table;
  for (std::int64_t bytes = 16 << 10; bytes <= std::int64_t{128} << 20; bytes *= 2) {
    const at::Tensor gradient = group.allocate({bytes / 4}, torch::kFloat), weights = torch::zeros({bytes / 4});
    const auto step = [&](bool exchanges) {
      group.barrier();
      const auto begin = Clock::now();
      gradient.fill_(1e-3);
      if (exchanges) group.all_reduce(gradient, ddpkit::ReduceOp::kAvg);
      weights.sub_(gradient, 1e-3);
      return microseconds(Clock::now() - begin);
    };
    const int rounds = static_cast<int>(std::clamp<std::int64_t>((std::int64_t{2} << 30) / bytes, 15, 600));
    std::vector<double> with, without;
    for (int i = 0; i < rounds + 3; ++i) {
      const double on = step(true), off = step(false);
      if (i < 3) continue;
      with.push_back(on);
      without.push_back(off);
    }
    const double us = std::max(0.1, median(with) - median(without));
    table += fmt::format(" {} {}", bytes, us);
  }
  if (group.rank() == 0) answer(table);
}

int run_rank(const std::string& what, const std::string& timeline) {
  at::set_num_threads(1);
  const auto environment = ddpkit::read_launch_environment();
  ddpkit::bench::pin_to_core(environment.local_rank, environment.local_world_size);
  const ProcessGroup group = ddpkit::init_process_group({.backend = "shm", .device = at::kCPU});
  if (what == "exchange") {
    exchange_rank(group);
  } else {
    train_rank(group, what, timeline);
  }
  return 0;
}

/// Starts this program on `ranks` ranks and returns the output of rank 0.
std::string ask(int ranks, const std::string& what, const std::string& timeline) {
  std::string output;
  const auto result = ddpkit::launch(
      {.command = {std::filesystem::read_symlink("/proc/self/exe").string(), "--as-rank", what, "--timeline", timeline},
       .ranks = ranks,
       .time_limit = std::chrono::minutes(5),
       .on_output = [&](int rank, const std::string& text) {
         if (rank == 0) output += text;
       }});
  const std::size_t at = output.find(kAnswer);
  if (result.exit_code() != 0 || at == std::string::npos)
    throw Error(fmt::format("the measurement of {} failed: {}", what, output));
  return output.substr(at + std::string_view(kAnswer).size());
}

std::vector<AllReducePoint> measure_exchange() {
  std::istringstream text(ask(kRanks, "exchange", ""));
  std::vector<AllReducePoint> points;
  for (AllReducePoint point; text >> point.bytes >> point.us;) points.push_back(point);
  return points;
}

struct Row {
  std::string model;
  double one_us = 0, predicted_us = 0, measured_us = 0;
};

Row measure(const std::string& model, int rounds, const ddpkit::scaling::AllReduceModel& exchange,
            const std::filesystem::path& timeline) {
  std::vector<double> one, predicted, measured;
  for (int round = 0; round < rounds; ++round) {
    // Both measurements include the cost of recording.
    ask(1, model, timeline.string());
    const auto profile = ddpkit::cli::read_profile(timeline.string());
    measured.push_back(std::stod(ask(kRanks, model, timeline.string())));
    one.push_back(profile.step_us());
    predicted.push_back(ddpkit::scaling::predict_step(profile, exchange, kRanks, {.overlap = false}).us);
  }
  return {model, median(one), median(predicted), median(measured)};
}

int run(const std::vector<std::string>& models, int rounds, const std::string& csv) {
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("ddpkit-estimate-{}", ::getpid());
  std::filesystem::create_directory(folder);
  struct Remove {
    std::filesystem::path folder;
    ~Remove() {
      std::error_code ignored;
      std::filesystem::remove_all(folder, ignored);
    }
  } remove{folder};
  std::ofstream file;
  if (!csv.empty()) {
    file.open(csv, std::ios::trunc);
    if (!(file << "model,one_rank_us,predicted_us,measured_us,error\n").flush())
      throw Error(fmt::format("cannot write {}", csv));
  }
  std::cerr << "measuring the time of exchanging fresh gradients on two ranks\n";
  const auto exchange = ddpkit::scaling::measured(measure_exchange(), kRanks);
  std::cout << fmt::format("{:<14} {:>12} {:>14} {:>13} {:>8}\n", "model", "1 rank, ms", "predicted, ms", "2 ranks, ms",
                           "error");
  for (const std::string& model : models) {
    const Row row = measure(model, rounds, exchange, folder / "timeline.json");
    const double error = row.predicted_us / row.measured_us - 1;
    std::cout << fmt::format("{:<14} {:>12.3f} {:>14.3f} {:>13.3f} {:>+6.1f} %", row.model, row.one_us / 1e3,
                             row.predicted_us / 1e3, row.measured_us / 1e3, 100 * error)
              << std::endl;
    if (file.is_open())
      file << fmt::format("{},{:.2f},{:.2f},{:.2f},{:.4f}", row.model, row.one_us, row.predicted_us, row.measured_us,
                          error)
           << std::endl;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  ddpkit::train::Options app("bench_estimate", "Error of ddpkit estimate, compared with measurements on this host");
  std::vector<std::string> models = {"mlp-106k", "mlp-1m", "mlp-7.6m", "cnn", "lstm", "transformer"};
  int rounds = 3;
  std::string csv, as_rank, timeline;
  app.add("model", &models, "Models of ddpkit bench step");
  app.add("rounds", &rounds, "Alternating runs with one and two ranks; the medians count").between(1, 1000);
  app.add("csv", &csv, "Write the rows to this file too");
  app.add("as_rank", &as_rank, "").hidden();
  app.add("timeline", &timeline, "").hidden();
  try {
    if (const std::string help = app.parse(argc, argv); !help.empty()) return std::cout << help, 0;
    return as_rank.empty() ? run(models, rounds, csv) : run_rank(as_rank, timeline);
  } catch (const std::exception& error) {
    std::cerr << "bench_estimate: " << error.what() << '\n';
    return 1;
  }
}
