// Compares DataParallel, DistributedDataParallel and one device on the same data in one run:
//
//     ddpkit run -n 2 -- bench_data_parallel [BATCH [ROUNDS]]
//
// Uses one thread per rank or replica. Prints samples per second, as the median over all steps of all rounds. The last
// row is DataParallel without its arena: malloc returns its blocks to the system in each step.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/data_parallel.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/train/main.h>

namespace {

namespace nn = torch::nn;
using torch::Tensor;

nn::Sequential make_model() {
  torch::manual_seed(1);
  return nn::Sequential(nn::Conv1d(nn::Conv1dOptions(9, 64, 5).padding(2)), nn::ReLU(),
                        nn::Conv1d(nn::Conv1dOptions(64, 64, 5).padding(2)), nn::ReLU(), nn::AdaptiveAvgPool1d(1),
                        nn::Flatten(), nn::Linear(64, 6));
}

using Times = std::map<std::string, std::vector<double>>;  // [way] -> seconds per step

void measure(std::vector<double>& times, torch::optim::Optimizer& optimizer, const std::function<void()>& gradients) {
  constexpr int kWarm = 3, kSteps = 10;
  for (int i = 0; i < kWarm + kSteps; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    optimizer.zero_grad();
    gradients();
    optimizer.step();
    if (i >= kWarm) times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
}

void measure_data_parallel(Times& times, const std::string& name, int replicas, const Tensor& x, const Tensor& y,
                           bool arena) {
  auto model = make_model();
  torch::optim::SGD optimizer(model->parameters(), 0.01);
  ddpkit::DataParallel dp(model, {.replicas = replicas, .threads_per_replica = 1, .arena = arena});
  measure(times[name], optimizer, [&] {
    dp.train_step(std::make_tuple(x, y), [](nn::SequentialImpl& replica, auto& part) {
      return torch::cross_entropy_loss(replica.forward(std::get<0>(part)), std::get<1>(part));
    });
  });
}

void run(std::int64_t batch, int rounds, ddpkit::train::Program& program) {
  const auto group = program.init_process_group();
  at::set_num_threads(1);
  const int ranks = group.world_size();
  torch::manual_seed(2);
  // `batch` samples per device.
  const Tensor x = torch::randn({batch * ranks, 9, 128});
  const Tensor y = torch::randint(6, {batch * ranks}, torch::kLong);
  const Tensor my_x = x.narrow(0, batch * group.rank(), batch);
  const Tensor my_y = y.narrow(0, batch * group.rank(), batch);
  Times times;
  for (int round = 0; round < rounds; ++round) {
    if (group.rank() == 0) {
      auto model = make_model();
      torch::optim::SGD optimizer(model->parameters(), 0.01);
      measure(times["1 device"], optimizer, [&] { torch::cross_entropy_loss(model->forward(my_x), my_y).backward(); });
      measure_data_parallel(times, "DataParallel, malloc", ranks, x, y, false);
      measure_data_parallel(times, "DataParallel", ranks, x, y, true);
    }
    group.barrier();
    auto model = make_model();
    torch::optim::SGD optimizer(model->parameters(), 0.01);
    ddpkit::DistributedDataParallel ddp(model, group);
    measure(times["DistributedDataParallel"], optimizer,
            [&] { torch::cross_entropy_loss(ddp(my_x), my_y).backward(); });
    group.barrier();
  }
  if (group.rank() != 0) return;
  fmt::print("{:<26} {:>10} {:>12} {:>8}\n", fmt::format("batch {} a device, {} devices", batch, ranks), "ms",
             "samples/s", "x 1");
  double alone = 0;
  for (const char* way : {"1 device", "DataParallel", "DistributedDataParallel", "DataParallel, malloc"}) {
    std::vector<double>& steps = times[way];
    std::sort(steps.begin(), steps.end());
    const double median = steps[steps.size() / 2];
    const bool is_alone = alone == 0;
    const double rate = static_cast<double>(is_alone ? batch : batch * ranks) / median;
    if (is_alone) alone = rate;
    fmt::print("{:<30} {:>10.2f} {:>12.0f} {:>8.2f}\n", way, median * 1e3, rate, rate / alone);
  }
}

}  // namespace

int main(int argc, char** argv) {
  ddpkit::train::Options options("bench_data_parallel",
                                 "DataParallel and DistributedDataParallel on the same data, and one device.");
  std::int64_t batch = 256;
  int rounds = 3;
  options.add("batch", &batch, "Samples per device and step").positional().between(1, 1 << 20);
  options.add("rounds", &rounds, "Rounds of all systems").positional().between(1, 1000);
  return ddpkit::train::run_main(options, argc, argv,
                                 [&](ddpkit::train::Program& program) { run(batch, rounds, program); });
}
