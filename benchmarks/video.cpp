// Compares the two halves of the video trainer (decoding and the model), alone and together, with Python. `script/bench
// video` runs this. Each run is a separate process. The runs alternate; the output shows medians.
#include <sys/resource.h>
#include <torch/torch.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include <fmt/format.h>

#include <ddpkit/ddpkit.h>
#include <ddpkit/train/main.h>

#include "bench/python.h"
#include "bench/ratios.h"
#include "bench/timing.h"
#include "trainer_program.h"
#include "video/clips.h"
#include "video/generate.h"
#include "video/model.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::string role;  // The role of a measuring process. Empty in the parent process.
  std::string video;
  std::string data;
  std::vector<int> sizes = {64, 112};
  std::vector<int> batches = {4, 8, 16, 32};
  int batch_size = 8;
  int video_size = 256;
  int videos = 20;
  int trials = 200;
  int rounds = 3;
  int ranks = 2;
  int steps = 12;
  int threads = 1;
  bool peers = false;
};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// ---- Measuring processes ------------------------------------------------------------------------

// Decodes each trial once, in shuffled order, on `threads` threads.
void measure_decoding(const Options& options) {
  video::DataFaults faults(video::trials_file(options.data), video::OnBadData::kStop);
  const video::TrialSet set = video::read_trials(options.data, {}, 17, faults);
  const int size = options.sizes.front();
  video::ClipLoader loader(options.data, {.size = {size, size}});
  for (const video::Trial& trial : set.trials) loader.index(trial.video);
  const ddpkit::DistributedSampler sampler(set.trials.size(), 1, 0);
  const std::vector<std::size_t> order = sampler.indices();
  const std::int64_t batch = options.batch_size, count = static_cast<std::int64_t>(order.size()) / batch;
  const auto start = Clock::now();
  ddpkit::Prefetcher<video::Clips> clips(
      count,
      [&](std::int64_t number) {
        return video::load_clips(set, {order.begin() + number * batch, order.begin() + (number + 1) * batch}, loader,
                                 video::Variation{}, false);
      },
      {.num_workers = options.threads});
  while (clips.next()) {
  }
  fmt::print("{}\n",
             nlohmann::json{{"clips_per_second", static_cast<double>(count * batch) / seconds_since(start)}}.dump());
}

// Runs training steps on clips that are already decoded.
void measure_model(const Options& options, ddpkit::train::Program& program) {
  const ddpkit::ProcessGroup group = program.init_process_group();
  torch::manual_seed(0);
  auto model = std::make_shared<video::Classifier>(video::ModelOptions{.classes = 8});
  model->to(group.device());
  ddpkit::DistributedDataParallel ddp(model, group);
  ddpkit::optim::FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  const int size = options.sizes.front();
  const at::Tensor pixels = torch::randint(0, 256, {options.batch_size, 17, size, size}, torch::kByte);
  const at::Tensor labels = torch::randint(0, 8, {options.batch_size}).to(group.device());
  constexpr int kWarmUp = 3;
  Clock::time_point start;
  for (int step = 0; step < kWarmUp + options.steps; ++step) {
    if (step == kWarmUp) {
      group.barrier();
      start = Clock::now();
    }
    std::vector<video::Augmentation> augmentations;
    for (int i = 0; i < options.batch_size; ++i)
      augmentations.push_back(video::draw_augmentation(static_cast<std::uint64_t>(step * options.batch_size + i)));
    optimizer.zero_grad();
    torch::cross_entropy_loss(ddp(video::prepare_clips(pixels.to(group.device()), augmentations)), labels).backward();
    optimizer.step();
  }
  group.barrier();
  const double seconds = seconds_since(start);
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  if (group.rank() == 0)
    fmt::print("{}\n",
               nlohmann::json{{"clips_per_second", options.steps * options.batch_size * group.world_size() / seconds},
                              {"peak_bytes", std::int64_t{usage.ru_maxrss} * 1024}}
                   .dump());
}

// ---- Parent process ------------------------------------------------------------------------------

struct Result {
  double clips_per_second = 0;
  double peak_mib = 0;
};

Result run(std::vector<std::string> command, int ranks) {
  // A process that decodes alone may use all cores.
  if (ranks > 1) command = ddpkit::bench::on_own_core(std::move(command), ranks);
  std::vector<double> rates;
  Result found;
  for (const auto& json : ddpkit::bench::run_trainer(command, ranks)) {
    rates.push_back(json["clips_per_second"]);
    found.peak_mib = static_cast<double>(json.value("peak_bytes", std::int64_t{0})) / (1 << 20);
  }
  if (rates.size() > 1) rates.erase(rates.begin());  // Drops the first epoch: the caches are cold.
  found.clips_per_second = ddpkit::bench::median(rates);
  return found;
}

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options), self_(std::filesystem::read_symlink("/proc/self/exe")) {}

  Result decoding(bool python, int size, int threads) const {
    if (python) return run(peer("decode", size, options_.batch_size, threads), 1);
    return run({self_, "--role", "decode", "--data", options_.data, "--sizes", std::to_string(size), "--threads",
                std::to_string(threads), "--batch-size", std::to_string(options_.batch_size)},
               1);
  }
  Result model(bool python, int size, int batch) const {
    if (python) return run(peer("model", size, batch, 0), options_.ranks);
    return run({self_, "--role", "model", "--sizes", std::to_string(size), "--batch-size", std::to_string(batch),
                "--steps", std::to_string(options_.steps)},
               options_.ranks);
  }
  Result both(bool python, int size) const {
    if (python) return run(peer("both", size, options_.batch_size, 1), options_.ranks);
    return run({options_.video, "--data", options_.data, "--size", std::to_string(size), "--batch-size",
                std::to_string(options_.batch_size), "--epochs", "3", "--check", "index", "--num-workers", "1",
                "--json", "--no-save"},
               options_.ranks);
  }

 private:
  std::vector<std::string> peer(const std::string& role, int size, int batch, int workers) const {
    std::vector<std::string> command = ddpkit::bench::python_command("video.py");
    for (const std::string& word : {role, options_.data, std::to_string(size), std::to_string(batch),
                                    std::to_string(options_.steps), std::to_string(workers)})
      command.push_back(word);
    return command;
  }

  const Options& options_;
  std::string self_;
};

void compare(const Options& options) {
  const Bench bench(options);
  const int size = options.sizes.front();
  std::map<std::pair<bool, std::string>, std::vector<double>> rates;  // [is Python, role]
  const std::vector<std::string> rows = {"decoding, 1 thread", fmt::format("decoding, {} threads", options.ranks),
                                         fmt::format("model, {} ranks", options.ranks),
                                         fmt::format("both, {} ranks", options.ranks)};
  for (int round = 0; round < options.rounds; ++round) {
    for (const bool python : {false, true}) {
      if (python && !options.peers) continue;
      fmt::print(stderr, "round {}/{}: {}\n", round + 1, options.rounds, python ? "Python" : "ddpkit");
      rates[{python, rows[0]}].push_back(bench.decoding(python, size, 1).clips_per_second);
      rates[{python, rows[1]}].push_back(bench.decoding(python, size, options.ranks).clips_per_second);
      rates[{python, rows[2]}].push_back(bench.model(python, size, options.batch_size).clips_per_second);
      rates[{python, rows[3]}].push_back(bench.both(python, size).clips_per_second);
    }
  }
  const auto rate = [&](bool python, std::size_t row) { return ddpkit::bench::median(rates.at({python, rows[row]})); };
  fmt::print("Clips of 17 frames at {}x{} out of {}x{} videos, batch {} a rank, {} rounds:\n\n", size, size,
             options.video_size, options.video_size, options.batch_size, options.rounds);
  fmt::print("| clips/s | ddpkit |{}\n| --- | ---: |{}\n", options.peers ? " Python | ratio |" : "",
             options.peers ? " ---: | ---: |" : "");
  for (std::size_t row = 0; row < rows.size(); ++row) {
    fmt::print("| {} | {:.1f} |", rows[row], rate(false, row));
    if (options.peers) fmt::print(" {:.1f} | {:.2f}x |", rate(true, row), rate(false, row) / rate(true, row));
    fmt::print("\n");
  }
  // On the same cores, a clip costs its decoding time plus its part of the step time.
  const auto allowed = [&](bool python) { return 1 / (1 / rate(python, 1) + 1 / rate(python, 2)); };
  fmt::print("| what the halves allow | {:.1f} |", allowed(false));
  if (options.peers) fmt::print(" {:.1f} | |", allowed(true));
  ddpkit::bench::note_ratio("video: what the halves allow over the pipeline's rate", allowed(false) / rate(false, 3));
  if (options.peers)
    ddpkit::bench::note_ratio("video: Python's pipeline over the rate of ddpkit's", rate(true, 3) / rate(false, 3));
  fmt::print("\n| of that reached | {:.0f} % |", 100 * rate(false, 3) / allowed(false));
  if (options.peers) fmt::print(" {:.0f} % | |", 100 * rate(true, 3) / allowed(true));
  fmt::print("\n\n");
}

void tabulate_batches(const Options& options) {
  const Bench bench(options);
  fmt::print(
      "The model on {} ranks, by batch:\n\n| size | batch a rank | clips/s | ms a step | peak MiB a rank |\n"
      "| --- | ---: | ---: | ---: | ---: |\n",
      options.ranks);
  for (const int size : options.sizes) {
    for (const int batch : options.batches) {
      fmt::print(stderr, "{}x{}, batch {}\n", size, size, batch);
      const Result result = bench.model(false, size, batch);
      fmt::print("| {}x{} | {} | {:.1f} | {:.0f} | {:.0f} |\n", size, size, batch, result.clips_per_second,
                 1000 * batch * options.ranks / result.clips_per_second, result.peak_mib);
    }
  }
}

void measure(Options options) {
  if (options.peers) {
    if (const std::string why = ddpkit::bench::why_no_python(); !why.empty()) throw ddpkit::train::UsageError(why);
  }
  const ddpkit::bench::TemporaryData made("video");
  if (options.data.empty()) {
    options.data = made.path();
    fmt::print(stderr, "generating {} videos of {}x{}\n", options.videos, options.video_size, options.video_size);
    video::generate(options.data, {.videos = options.videos,
                                   .trials = options.trials,
                                   .least_of_class = 2,
                                   .size = {options.video_size, options.video_size}});
  }
  compare(options);
  if (!options.batches.empty()) tabulate_batches(options);
}

}  // namespace

int main(int argc, char** argv) {
  ddpkit::train::Options app("bench_video", "The video trainer's decoding and model, alone and together.");
  Options options;
  options.video = std::filesystem::path(argv[0]).parent_path() / "video";
  app.add("sizes", &options.sizes, "Clip sizes; the first is compared").between(1, 1 << 20);
  app.add("batches", &options.batches, "Batch sizes of the table").between(1, 1 << 20);
  app.add("batch_size", &options.batch_size, "Clips per step on each rank").between(1, 1 << 20);
  app.add("video_size", &options.video_size, "Frame size of the generated videos").between(16, 4096);
  app.add("videos", &options.videos, "Generated videos").between(1, 1 << 20);
  app.add("trials", &options.trials, "Generated trials").between(1, 1 << 20);
  app.add("rounds", &options.rounds, "Runs of each").between(1, 1000);
  app.add("ranks", &options.ranks, "Ranks, and threads of decoding").between(1, 1024);
  app.add("steps", &options.steps, "Steps per run of the model").between(1, 1 << 20);
  app.add("data", &options.data, "Folder in the layout of `video generate`, instead of generated data");
  app.add("peers", &options.peers, "Also measure Python's pipeline: PyAV, DataLoader workers, DDP");
  app.add("role", &options.role, "").hidden();
  app.add("threads", &options.threads, "").hidden();
  return ddpkit::train::run_main(app, argc, argv, [&](ddpkit::train::Program& program) {
    if (options.role == "decode") return measure_decoding(options);
    if (options.role == "model") return measure_model(options, program);
    measure(options);
  });
}
