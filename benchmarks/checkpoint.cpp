// Measures the time that checkpoints add to training:
//
//     ddpkit run -n 2 -- bench_checkpoint [MODEL [EVERY [FOLDER]]]
//
// Trains MODEL (mlp-7.6m) under DistributedDataParallel with AdamW. Compares steps without checkpoints with steps that
// write a checkpoint after every EVERY (100) steps, synchronously or in the background. The three variants alternate.
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/ddpkit.h>
#include <ddpkit/train/checkpoint.h>
#include <ddpkit/train/main.h>

#include "bench/ratios.h"
#include "bench/step_models.h"
#include "bench/timing.h"

namespace {

using Clock = std::chrono::steady_clock;
using ddpkit::bench::median;
using ddpkit::bench::microseconds;

constexpr int kTurns = 6;

struct Measured {
  std::vector<double> turn_us;  ///< Mean time of a step, including its part of the checkpoint. [turn]
  std::vector<double> save_us;  ///< Time of the save call.
};

void run(const std::string& model, int every, const std::filesystem::path& parent, ddpkit::train::Program& program) {
  torch::set_num_threads(1);
  const auto group = program.init_process_group({.device = torch::Device(torch::kCPU)});
  const std::filesystem::path folder =
      parent / fmt::format("ddpkit-bench-checkpoint-{}", group.all_gather_bytes(std::to_string(::getpid()))[0]);
  if (group.rank() == 0) std::filesystem::create_directories(folder);
  group.barrier();

  const auto task = ddpkit::bench::make_step_task(model, 32, group.rank());
  ddpkit::DistributedDataParallel ddp(task.model, group);
  ddpkit::optim::FusedAdamW optimizer(task.model->parameters(), torch::optim::AdamWOptions(1e-4));
  const auto step = [&] {
    optimizer.zero_grad();
    torch::cross_entropy_loss(ddp(task.input), task.target).backward();
    optimizer.step();
  };
  for (int i = 0; i < 20; ++i) step();

  std::vector<Measured> all(3);
  std::uintmax_t bytes = 0;
  ddpkit::train::Checkpoint in_place(folder / "checkpoint.pt", group, {.asynchronous = false});
  ddpkit::train::Checkpoint behind(folder / "checkpoint.pt", group);
  behind.save(*task.model, optimizer, {});  // Allocates the memory.
  behind.wait();
  for (int turn = 0; turn < kTurns; ++turn) {
    for (std::size_t way = 0; way < all.size(); ++way) {
      ddpkit::train::Checkpoint& checkpoint = way == 2 ? behind : in_place;
      const auto begin = Clock::now();
      if (way > 0) {
        checkpoint.save(*task.model, optimizer, {.step = turn});
        all[way].save_us.push_back(microseconds(Clock::now() - begin));
      }
      for (int i = 0; i < every; ++i) step();
      all[way].turn_us.push_back(microseconds(Clock::now() - begin) / every);
      checkpoint.wait();
      if (way > 0 && group.rank() == 0) bytes = std::filesystem::file_size(folder / "checkpoint.pt");
    }
  }
  if (group.rank() == 0) {
    std::filesystem::remove_all(folder);
    fmt::print("{}, {} ranks, a checkpoint of {:.1f} MB every {} steps:\n\n", model, group.world_size(),
               static_cast<double>(bytes) / 1e6, every);
    fmt::print("| checkpoint | us a step | over none | ms that save() takes |\n| --- | ---: | ---: | ---: |\n");
    const double none = median(all[0].turn_us);
    fmt::print("| none | {:.0f} | | |\n", none);
    for (const std::size_t way : {1, 2}) {
      // Compares adjacent turns, so that variations of the machine affect both.
      std::vector<double> over;
      for (int turn = 0; turn < kTurns; ++turn)
        over.push_back(all[way].turn_us[static_cast<std::size_t>(turn)] /
                       all[0].turn_us[static_cast<std::size_t>(turn)]);
      ddpkit::bench::note_ratio(
          fmt::format("checkpoint: {}, a step over one without", way == 1 ? "in place" : "asynchronous"), median(over));
      fmt::print("| {} | {:.0f} | {:+.1f} % | {:.1f} |\n", way == 1 ? "in place" : "asynchronous",
                 median(all[way].turn_us), 100 * (median(over) - 1), median(all[way].save_us) / 1000);
    }
  }
  group.barrier();
}

}  // namespace

int main(int argc, char** argv) {
  ddpkit::train::Options options("bench_checkpoint", "The time that checkpoints add to training.");
  std::string model = "mlp-7.6m", folder = std::filesystem::temp_directory_path();
  int every = 100;
  options.add("model", &model, "Model of ddpkit bench step").positional();
  options.add("every", &every, "Steps from checkpoint to checkpoint").positional().at_least(1);
  options.add("folder", &folder, "Folder of the checkpoints").positional();
  return ddpkit::train::run_main(options, argc, argv,
                                 [&](ddpkit::train::Program& program) { run(model, every, folder, program); });
}
