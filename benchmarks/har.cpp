// Compares the har trainer on 1, 2 and 4 devices under DataParallel and DistributedDataParallel with the same model in
// Python. `script/bench har` runs this. Each run is a separate process. The runs alternate; the output shows medians.
#include <torch/cuda.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include <fmt/format.h>

#include <ddpkit/comm/environment.h>
#include <ddpkit/train/main.h>

#include "bench/bars.h"
#include "bench/python.h"
#include "bench/ratios.h"
#include "bench/timing.h"
#include "har/generate.h"
#include "trainer_program.h"

namespace {

using ddpkit::train::UsageError;

struct Options {
  std::string har;
  std::string data;
  std::vector<int> devices = {1, 2, 4};
  int batch_size = 256;
  int epochs = 4;
  int rounds = 3;
  int windows = 2048;
  bool peers = false;
  std::string csv;
  std::string plot;
};

enum class Way { kDp, kDdp, kLibTorchDp, kPythonDp, kPythonDdp };

struct System {
  Way way;
  int devices;
  std::string name() const {
    switch (way) {
      case Way::kDp:
        return "ddpkit DP";
      case Way::kDdp:
        return "ddpkit DDP";
      case Way::kLibTorchDp:
        return "LibTorch data_parallel";
      case Way::kPythonDp:
        return "Python DP";
      case Way::kPythonDdp:
        break;
    }
    return "Python DDP";
  }
  bool is_python() const { return way == Way::kPythonDp || way == Way::kPythonDdp; }
  bool is_one_process() const { return way != Way::kDdp && way != Way::kPythonDdp; }
  bool operator<(const System& other) const { return std::pair(way, devices) < std::pair(other.way, other.devices); }
};

struct Measured {
  std::vector<double> rates;             // Samples per second of each epoch, without the first epoch of a run.
  std::vector<std::int64_t> on_devices;  // Bytes. [GPU]
  std::vector<std::int64_t> peaks;       // Bytes. [process]

  double rate() const { return ddpkit::bench::median(rates); }
};

void run(const System& system, const Options& options, Measured& measured) {
  const int ranks = system.is_one_process() ? 1 : system.devices;
  const bool on_gpus = torch::cuda::device_count() > 0;
  std::vector<std::string> command;
  // Pins one core per device if there are enough cores. Otherwise the scheduler assigns the cores.
  if (!on_gpus && system.is_one_process() && system.devices <= ddpkit::available_cores())
    command = {"taskset", "-c", fmt::format("0-{}", system.devices - 1)};
  const auto add = [&](const std::vector<std::string>& more) {
    command.insert(command.end(), more.begin(), more.end());
  };
  const std::string batch = std::to_string(options.batch_size), epochs = std::to_string(options.epochs);
  std::string ids = "0";
  for (int id = 1; id < system.devices; ++id) ids += fmt::format(",{}", id);
  if (system.is_python()) {
    add(ddpkit::bench::python_command("har.py"));
    add({options.data, epochs, batch, system.way == Way::kPythonDp ? ids : "ddp"});
  } else {
    add({options.har, "--data", options.data, "--epochs", epochs, "--batch-size", batch, "--mode", "cnn", "--no-amp",
         "--json", "--no-save", "--multi-gpu"});
    if (system.way == Way::kDdp)
      add({"ddp"});
    else if (system.way == Way::kLibTorchDp)
      add({"libtorch-dp", "--gpu-ids", ids});
    else if (on_gpus)
      add({"dp", "--gpu-ids", ids});
    else
      add({"dp", "--replicas", std::to_string(system.devices)});
  }
  if (!on_gpus && !system.is_one_process()) command = ddpkit::bench::on_own_core(std::move(command), system.devices);
  int epoch = 0;
  for (const auto& json : ddpkit::bench::run_trainer(command, ranks)) {
    if (++epoch > 1) measured.rates.push_back(json["samples_per_second"]);
    measured.peaks = json["peak_memory_bytes"].get<std::vector<std::int64_t>>();
    measured.on_devices = json["peak_device_bytes"].get<std::vector<std::int64_t>>();
  }
  if (epoch != options.epochs)
    throw ddpkit::Error(
        fmt::format("{} on {} devices printed {} epochs of {}", system.name(), system.devices, epoch, options.epochs));
}

void print_tables(const std::map<System, Measured>& all, const Options& options) {
  constexpr double kMib = 1 << 20;
  const double alone = all.at({Way::kDdp, 1}).rate();
  fmt::print(
      "| system | devices | samples/s | s an epoch | speed-up | efficiency |\n| --- | ---: | ---: | ---: | ---: | ---: "
      "|\n");
  for (const auto& [system, measured] : all) {
    const double rate = measured.rate();
    fmt::print("| {} | {} | {:.0f} | {:.2f} | {:.2f}x | {:.0f} % |\n", system.name(), system.devices, rate,
               options.windows / rate, rate / alone, 100 * rate / alone / system.devices);
    // If devices share cores, the result does not show the scaling of ddpkit.
    const bool has_cores = system.devices <= ddpkit::available_cores();
    if (!system.is_python() && has_cores && options.devices.size() > 1)
      ddpkit::bench::note_ratio(
          fmt::format("har: {}, time of a window over one rank's, {} devices", system.name(), system.devices),
          alone / rate);
  }
  fmt::print("\n| system | devices | peak MiB of each process | MiB a device |\n| --- | ---: | --- | ---: |\n");
  for (const auto& [system, measured] : all) {
    std::string peaks;
    double sum = 0;
    for (const std::int64_t bytes : measured.peaks) {
      peaks += fmt::format("{}{:.0f}", peaks.empty() ? "" : ", ", static_cast<double>(bytes) / kMib);
      sum += static_cast<double>(bytes);
    }
    std::string devices;
    for (const std::int64_t bytes : measured.on_devices)
      devices += fmt::format("{}{:.0f}", devices.empty() ? "" : ", ", static_cast<double>(bytes) / kMib);
    if (devices.empty()) devices = fmt::format("{:.0f}", sum / kMib / system.devices);
    fmt::print("| {} | {} | {} | {} |\n", system.name(), system.devices, peaks, devices);
  }
}

void write_csv(const std::map<System, Measured>& all, const Options& options) {
  std::ofstream file(options.csv);
  file << "system,devices,batch,samples_per_second,speed_up,peak_bytes\n";
  const double alone = all.at({Way::kDdp, 1}).rate();
  for (const auto& [system, measured] : all) {
    std::int64_t peak = 0;
    for (const std::int64_t bytes : measured.peaks) peak += bytes;
    file << fmt::format("{},{},{},{:.1f},{:.4f},{}\n", system.name(), system.devices, options.batch_size,
                        measured.rate(), measured.rate() / alone, peak);
  }
  if (!file.flush()) throw ddpkit::Error(fmt::format("cannot write {}", options.csv));
}

void plot(const std::map<System, Measured>& all, const Options& options) {
  std::vector<ddpkit::bench::BarGroup> groups;
  for (const int devices : options.devices) {
    ddpkit::bench::BarGroup group{.name = fmt::format("{} device{}", devices, devices == 1 ? "" : "s"), .bars = {}};
    for (const auto& [system, measured] : all) {
      if (system.devices == devices) group.bars.emplace_back(system.name(), measured.rate());
    }
    groups.push_back(std::move(group));
  }
  std::ofstream file(options.plot);
  file << ddpkit::bench::draw_bars(fmt::format("har, cnn, batch {} a device", options.batch_size), "samples/s", groups);
  if (!file.flush()) throw ddpkit::Error(fmt::format("cannot write {}", options.plot));
}

void measure(Options options) {
  std::set<int> wanted(options.devices.begin(), options.devices.end());
  wanted.insert(1);  // The reference of the speed-ups.
  options.devices.assign(wanted.begin(), wanted.end());
  const int gpus = static_cast<int>(torch::cuda::device_count());
  if (gpus > 0 && *wanted.rbegin() > gpus) {
    fmt::print(stderr, "this host has {} GPU{}: up to as many devices are measured\n", gpus, gpus == 1 ? "" : "s");
    std::erase_if(options.devices, [&](int devices) { return devices > gpus; });
  }
  if (options.peers) {
    if (const std::string why = ddpkit::bench::why_no_python(); !why.empty()) throw UsageError(why);
  }
  const ddpkit::bench::TemporaryData made("har");
  if (options.data.empty()) {
    options.data = made.path();
    har::generate_ucihar(options.data, {.train = options.windows, .test = 64});
  }
  std::map<System, Measured> all;
  for (const int devices : options.devices) {
    for (const Way way : {Way::kDp, Way::kDdp, Way::kLibTorchDp, Way::kPythonDp, Way::kPythonDdp}) {
      const System system{way, devices};
      const bool only_on_gpus = way == Way::kLibTorchDp || way == Way::kPythonDp;
      if ((gpus > 0 || !only_on_gpus) && (options.peers || !system.is_python())) all[system];
    }
  }
  for (int round = 0; round < options.rounds; ++round) {
    for (auto& [system, measured] : all) {
      fmt::print(stderr, "round {}/{}: {} on {}\n", round + 1, options.rounds, system.name(), system.devices);
      run(system, options, measured);
    }
  }
  print_tables(all, options);
  if (!options.csv.empty()) write_csv(all, options);
  if (!options.plot.empty()) plot(all, options);
}

}  // namespace

int main(int argc, char** argv) {
  ddpkit::train::Options app("bench_har", "The har trainer under DataParallel and DistributedDataParallel.");
  Options options;
  options.har = std::filesystem::path(argv[0]).parent_path() / "har";
  app.add("devices", &options.devices, "Numbers of devices").between(1, 1024);
  app.add("batch_size", &options.batch_size, "Windows per step on each device").between(1, 1 << 20);
  app.add("epochs", &options.epochs, "Epochs per run; the first is not counted").between(2, 1000);
  app.add("rounds", &options.rounds, "Runs of each system").between(1, 1000);
  app.add("windows", &options.windows, "Training windows of the generated set").between(1, 1 << 20);
  app.add("data", &options.data, "Folder in the UCI-HAR layout, instead of generated data");
  app.add("peers", &options.peers, "Also measure Python's DistributedDataParallel");
  app.add("csv", &options.csv, "Write the rows to a file");
  app.add("plot", &options.plot, "Draw the throughput into an SVG file");
  return ddpkit::train::run_main(app, argc, argv, [&](ddpkit::train::Program&) { measure(options); });
}
