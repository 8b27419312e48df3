// Measures the bytes that each communication hook sends, and the loss with each hook:
//
//     ddpkit run -n 2 -- bench_comm_hooks [STEPS]
//
// An MLP (561 inputs, three hidden layers of 128, 6 classes) learns the classes of a random teacher. All hooks use the
// same seeds. On one machine, bytes and losses are the same in each run; times differ.
#include <torch/torch.h>

#include <chrono>
#include <iostream>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/ddpkit.h>
#include <ddpkit/train/main.h>

namespace {

namespace comm_hooks = ddpkit::comm_hooks;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kInputs = 561, kHidden = 128, kClasses = 6, kBatch = 32, kHeldOut = 2048;

torch::nn::Sequential make_mlp() {
  torch::nn::Sequential model;
  std::int64_t inputs = kInputs;
  for (int layer = 0; layer < 3; ++layer) {
    model->push_back(torch::nn::Linear(inputs, kHidden));
    model->push_back(torch::nn::ReLU());
    inputs = kHidden;
  }
  model->push_back(torch::nn::Linear(inputs, kClasses));
  return model;
}

struct Row {
  std::string name;
  ddpkit::CommHook hook;
};

struct Result {
  double bytes_a_step = 0;
  double us_a_step = 0;
  double loss = 0;  ///< On samples that no rank has trained on.
};

Result measure(const ddpkit::ProcessGroup& group, const ddpkit::CommHook& hook, int steps) {
  torch::manual_seed(1);
  const torch::Tensor teacher = torch::randn({kInputs, kClasses});
  const auto classes = [&](const torch::Tensor& x) { return x.matmul(teacher).argmax(1); };
  const torch::Tensor held_out = torch::randn({kHeldOut, kInputs});
  auto model = make_mlp();
  ddpkit::DistributedDataParallel ddp(model, group);
  if (hook) ddp.register_comm_hook(hook);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  torch::manual_seed(static_cast<std::uint64_t>(2 + group.rank()));
  const auto begin = Clock::now();
  for (int step = 0; step < steps; ++step) {
    const torch::Tensor x = torch::randn({kBatch, kInputs});
    optimizer.zero_grad();
    torch::cross_entropy_loss(ddp(x), classes(x)).backward();
    optimizer.step();
  }
  const std::chrono::duration<double, std::micro> time = Clock::now() - begin;
  const torch::NoGradGuard no_grad;
  return {.bytes_a_step = static_cast<double>(ddp.stats().sent_bytes) / steps,
          .us_a_step = time.count() / steps,
          .loss = torch::cross_entropy_loss(model->forward(held_out), classes(held_out)).item<double>()};
}

void run(int steps, ddpkit::train::Program& program) {
  torch::set_num_threads(1);
  const auto group = program.init_process_group({.device = torch::Device(torch::kCPU)});
  const auto power_sgd = [&](std::int64_t rank) {
    // A tenth of the steps is uncompressed, as PowerSGDOptions recommends.
    return comm_hooks::PowerSGD(
        group, {.matrix_approximation_rank = rank, .start_powerSGD_iter = static_cast<std::uint64_t>(steps / 10)});
  };
  const std::vector<Row> rows = {{"none", nullptr},
                                 {"all_reduce", comm_hooks::all_reduce(group)},
                                 {"fp16_compress", comm_hooks::fp16_compress(group)},
                                 {"bf16_compress", comm_hooks::bf16_compress(group)},
                                 {"PowerSGD, rank 1", power_sgd(1)},
                                 {"PowerSGD, rank 2", power_sgd(2)},
                                 {"PowerSGD, rank 4", power_sgd(4)}};
  double full = 0;
  if (group.rank() == 0)
    std::cout << fmt::format("| {:<16} | {:>12} | {:>8} | {:>8} | {:>11} |\n", "hook", "bytes a step", "of none",
                             "loss", "us a step");
  for (const Row& row : rows) {
    const Result result = measure(group, row.hook, steps);
    if (full == 0) full = result.bytes_a_step;
    if (group.rank() == 0)
      std::cout << fmt::format("| {:<16} | {:>12.0f} | {:>7.1f}% | {:>8.4f} | {:>11.0f} |\n", row.name,
                               result.bytes_a_step, 100 * result.bytes_a_step / full, result.loss, result.us_a_step)
                << std::flush;
  }
  group.barrier();
}

}  // namespace

int main(int argc, char** argv) {
  ddpkit::train::Options options("bench_comm_hooks", "The bytes that each communication hook sends, and its loss.");
  int steps = 1000;
  options.add("steps", &steps, "Steps of each hook").positional().at_least(1);
  return ddpkit::train::run_main(options, argc, argv, [&](ddpkit::train::Program& program) { run(steps, program); });
}
