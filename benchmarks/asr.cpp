// Compares the asr trainer's full model on two ranks with the same model in Python's DistributedDataParallel.
// `script/bench asr` runs this. Each run is a separate process. The runs alternate; the output shows medians.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>

#include <fmt/format.h>

#include <ddpkit/train/main.h>

#include "bench/python.h"
#include "bench/ratios.h"
#include "bench/timing.h"
#include "trainer_program.h"

namespace {

using ddpkit::train::UsageError;

struct Options {
  std::string asr;
  std::string data = "data/speech/train.jsonl";
  std::string config = "examples/asr/configs/base_config.yaml";
  int ranks = 2;
  int batch_size = 16;
  int epochs = 3;
  int rounds = 3;
  bool peers = false;
};

// Model options of both sides. The config sets all other options.
constexpr const char* kModel =
    R"({"sample_rate": 8000, "mels": 40, "width": 512, "kernel": 5, "strides": [2, 2], "layers": 6, )"
    R"("memory_channels": 40, "order": 32, "theta": 64, "dropout": 0.1})";

struct Measured {
  std::vector<double> step_ms;         // Median per epoch, without the first epoch of each run.
  std::vector<double> epoch_seconds;   // Per epoch, without the first epoch of each run.
  std::vector<double> exposed_shares;  // Per epoch, without the first epoch of each run. Only ddpkit.
  std::vector<double> first_step_seconds;
  std::vector<double> peak_mib;  // Per rank and run.
};

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

std::vector<std::string> command_of(bool is_python, const Options& options) {
  const nlohmann::json model = nlohmann::json::parse(kModel);
  const std::string batch = std::to_string(options.batch_size), epochs = std::to_string(options.epochs);
  if (is_python) {
    std::vector<std::string> command = ddpkit::bench::python_command("asr.py");
    // torchrun starts Python's ranks, as users start them.
    std::vector<std::string> torchrun = {
        command[0],   "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", std::to_string(options.ranks),
        "--no-python"};
    for (const std::string& word : {options.data, epochs, batch, model.dump()}) command.push_back(word);
    command = ddpkit::bench::on_own_core(std::move(command), options.ranks);
    torchrun.insert(torchrun.end(), command.begin(), command.end());
    return torchrun;
  }
  // Both sides: float32, no SpecAugment, constant learning rate, all features cached.
  std::vector<std::string> command = {options.asr,
                                      "--config",
                                      options.config,
                                      "--json",
                                      "data.train=" + options.data,
                                      "data.dev=",
                                      "--no-save",
                                      "training.epochs=" + epochs,
                                      "training.batch_size=" + batch,
                                      "training.amp=false",
                                      "training.schedule=constant",
                                      "training.warmup_epochs=0",
                                      "training.spec_augment.enabled=false"};
  for (const auto& [key, value] : model.items()) {
    const std::string section = key == "sample_rate" || key == "mels" ? "features." : "model.";
    command.push_back(section + key + "=" + value.dump());
  }
  return ddpkit::bench::on_own_core(std::move(command), options.ranks);
}

void run(bool is_python, const Options& options, Measured& measured) {
  const double start = now();
  int epoch = 0;
  for (const auto& json : ddpkit::bench::run_trainer(command_of(is_python, options), is_python ? 1 : options.ranks)) {
    if (++epoch > 1) {
      measured.step_ms.push_back(json["median_step_ms"]);
      measured.epoch_seconds.push_back(json["seconds"]);
      if (!is_python) measured.exposed_shares.push_back(json["exchange_exposed_share"]);
    }
    if (epoch < options.epochs) continue;
    measured.first_step_seconds.push_back(json["first_step_at"].get<double>() - start);
    for (const double bytes : json["peak_memory_bytes"]) measured.peak_mib.push_back(bytes / (1 << 20));
  }
  if (epoch != options.epochs)
    throw ddpkit::Error(fmt::format("{} printed {} epochs of {}", is_python ? "Python" : "asr", epoch, options.epochs));
}

void print_row(const char* name, const Measured& measured) {
  using ddpkit::bench::median;
  fmt::print("| {} | {:.1f} | {:.2f} | {} | {:.2f} | {:.0f} |\n", name, median(measured.step_ms),
             median(measured.epoch_seconds),
             measured.exposed_shares.empty() ? "" : fmt::format("{:.1f} %", 100 * median(measured.exposed_shares)),
             median(measured.first_step_seconds),
             *std::max_element(measured.peak_mib.begin(), measured.peak_mib.end()));
}

void measure(const Options& options) {
  if (!std::filesystem::exists(options.data))
    throw UsageError(fmt::format("there is no {}: script/data speech fetches it", options.data));
  if (options.peers) {
    if (const std::string why = ddpkit::bench::why_no_python(); !why.empty()) throw UsageError(why);
  }
  Measured own, python;
  for (int round = 0; round < options.rounds; ++round) {
    fmt::print(stderr, "round {}/{}\n", round + 1, options.rounds);
    run(false, options, own);
    if (options.peers) run(true, options, python);
  }
  fmt::print(
      "| system, {} ranks | median step, ms | s an epoch | exposed exchange | start to first step, s | peak MiB |\n"
      "| --- | ---: | ---: | ---: | ---: | ---: |\n",
      options.ranks);
  print_row("ddpkit", own);
  if (!options.peers) return;
  print_row("Python DDP, Gloo", python);
  using ddpkit::bench::median;
  const auto most = [](const std::vector<double>& values) { return *std::max_element(values.begin(), values.end()); };
  const std::vector<std::pair<std::string, double>> ratios = {
      {"step", median(own.step_ms) / median(python.step_ms)},
      {"epoch", median(own.epoch_seconds) / median(python.epoch_seconds)},
      {"start to first step", median(own.first_step_seconds) / median(python.first_step_seconds)},
      {"peak memory", most(own.peak_mib) / most(python.peak_mib)}};
  std::string line;
  for (const auto& [what, ratio] : ratios) {
    line += fmt::format("{} {} {:.3g}", line.empty() ? "" : ",", what, ratio);
    ddpkit::bench::note_ratio("asr: " + what + ", over Python's DDP", ratio);
  }
  fmt::print("\nddpkit over Python:{}\n", line);
}

}  // namespace

int main(int argc, char** argv) {
  ddpkit::train::Options app(
      "bench_asr", "The asr trainer's full model on several ranks, compared with Python's DistributedDataParallel.");
  Options options;
  options.asr = std::filesystem::path(argv[0]).parent_path() / "asr";
  app.remove({"config"});
  app.add("data", &options.data, "Manifest of 8 kHz WAV files");
  app.add("config", &options.config, "Config of the asr trainer; the benchmark overrides some options");
  app.add("ranks", &options.ranks, "Ranks").between(1, 1024);
  app.add("batch_size", &options.batch_size, "Utterances per step, over all ranks").between(1, 1 << 20);
  app.add("epochs", &options.epochs, "Epochs per run; the first is not counted").between(2, 1000);
  app.add("rounds", &options.rounds, "Runs of each system").between(1, 1000);
  app.add("peers", &options.peers, "Also measure Python's DistributedDataParallel");
  return ddpkit::train::run_main(app, argc, argv, [&](ddpkit::train::Program&) { measure(options); });
}
