// Compares the model and PPO with direct computations.
#include <torch/torch.h>

#include <cmath>
#include <numbers>

#include <ddpkit/train/main.h>

#include "clstm_ppo/device.h"
#include "clstm_ppo/model.h"
#include "clstm_ppo/ppo.h"
#include "support/catch.h"

using namespace clstm_ppo;

TEST_CASE("advantages are the discounted sums of their definition", "[clstm_ppo]") {
  torch::manual_seed(1);
  const at::Tensor rewards = torch::randn({3, 7}), values = torch::randn({3, 8});
  const double gamma = 0.9, lambda = 0.8;
  const at::Tensor result = advantages_of(rewards, values, gamma, lambda);
  for (int episode = 0; episode < 3; ++episode) {
    for (int step = 0; step < 7; ++step) {
      double sum = 0;
      for (int later = step; later < 7; ++later) {
        const double error = rewards[episode][later].item<double>() +
                             gamma * values[episode][later + 1].item<double>() - values[episode][later].item<double>();
        sum += std::pow(gamma * lambda, later - step) * error;
      }
      CHECK(result[episode][step].item<double>() == Approx(sum).margin(1e-5));
    }
  }
}

TEST_CASE("the density of actions is the normal distribution's", "[clstm_ppo]") {
  const at::Tensor mean = torch::tensor({0.5F, -1.0F}), log_std = torch::tensor({0.2F, -0.7F}),
                   action = torch::tensor({0.1F, 0.4F});
  double density = 1;
  for (int i = 0; i < 2; ++i) {
    const double deviation = std::exp(log_std[i].item<double>());
    const double distance = (action[i].item<double>() - mean[i].item<double>()) / deviation;
    density *= std::exp(-distance * distance / 2) / (deviation * std::sqrt(2 * std::numbers::pi));
  }
  CHECK(log_probability(action, mean, log_std).item<double>() == Approx(std::log(density)).epsilon(1e-5));
}

TEST_CASE("PPO's objective is clipped on the side that would gain", "[clstm_ppo]") {
  const auto policy = [](double ratio, double advantage) {
    const at::Tensor now = torch::full({1, 1}, std::log(ratio)).requires_grad_(), zero = torch::zeros({1, 1});
    const PpoLoss loss = ppo_loss({.log_probability = now,
                                   .old_log_probability = zero,
                                   .advantage = torch::full({1, 1}, advantage),
                                   .value = zero,
                                   .target = zero,
                                   .log_std = torch::zeros({1})},
                                  {.clip = 0.2});
    loss.policy.backward();
    CHECK(loss.kl.item<double>() == Approx(ratio - 1 - std::log(ratio)).margin(1e-6));
    CHECK(loss.clipped.item<double>() == (std::abs(ratio - 1) > 0.2 ? 1 : 0));
    return std::pair(loss.policy.item<double>(), now.grad().item<double>());
  };
  CHECK(policy(1.1, 2).first == Approx(-2.2));
  CHECK(policy(1.5, 2).first == Approx(-2.4));
  CHECK(policy(1.5, 2).second == 0);
  CHECK(policy(0.5, 2).first == Approx(-1));
  CHECK(policy(0.5, 2).second == Approx(-1));
  CHECK(policy(0.5, -2).first == Approx(1.6));
  CHECK(policy(0.5, -2).second == 0);
  CHECK(policy(1.5, -2).first == Approx(3));
  CHECK(policy(1.5, -2).second == Approx(3));
}

TEST_CASE("PPO's total is policy, value and entropy by their weights", "[clstm_ppo]") {
  const at::Tensor zero = torch::zeros({2, 3});
  const PpoLoss loss = ppo_loss({.log_probability = zero,
                                 .old_log_probability = zero,
                                 .advantage = torch::ones({2, 3}),
                                 .value = torch::full({2, 3}, 3.0),
                                 .target = torch::ones({2, 3}),
                                 .log_std = torch::tensor({0.3F, -0.1F})},
                                {.entropy = 0.01, .value = 0.5});
  const double entropy = 0.2 + std::log(2 * std::numbers::pi * std::numbers::e);
  CHECK(loss.value.item<double>() == Approx(4));
  CHECK(loss.entropy.item<double>() == Approx(entropy));
  CHECK(loss.total.item<double>() == Approx(-1 + 0.5 * 4 - 0.01 * entropy));
}

TEST_CASE("the model gives the same in one call, step by step, and from a saved memory", "[clstm_ppo]") {
  torch::manual_seed(2);
  const torch::NoGradGuard no_grad;
  CascadedLSTM model({.state_size = 5, .assets = 2, .hidden = 8});
  const at::Tensor windows = torch::randn({3, 6, 4, 5});
  const auto [mean, value, log_std, after] = model.forward(windows, model.no_memory(3));
  CHECK(mean.sizes() == at::IntArrayRef({3, 6, 2}));
  CHECK(value.sizes() == at::IntArrayRef({3, 6}));
  CHECK(log_std.sizes() == at::IntArrayRef({2}));
  Memory memory = model.no_memory(3);
  for (int step = 0; step < 6; ++step) {
    auto [one_mean, one_value, unused, next] = model.forward(windows.narrow(1, step, 1), memory);
    CHECK(torch::allclose(one_mean.squeeze(1), mean.select(1, step), 1e-5, 1e-6));
    CHECK(torch::allclose(one_value.squeeze(1), value.select(1, step), 1e-5, 1e-6));
    memory = next;
  }
  CHECK(torch::allclose(memory.actor_h, after.actor_h, 1e-5, 1e-6));
  CHECK(torch::allclose(memory.critic_c, after.critic_c, 1e-5, 1e-6));
  // The first LSTM processes the whole window, the second LSTM the earlier outputs.
  at::Tensor other = windows.clone();
  other.select(2, 0).select(1, 5).add_(1);
  CHECK_FALSE(torch::allclose(std::get<0>(model.forward(other, model.no_memory(3))).select(1, 5), mean.select(1, 5)));
  other = windows.clone();
  other.select(1, 0).add_(1);
  CHECK_FALSE(torch::allclose(std::get<0>(model.forward(other, model.no_memory(3))).select(1, 5), mean.select(1, 5)));
}

TEST_CASE("N GPUs need N ranks on the host", "[clstm_ppo]") {
  clstm_ppo::TrainOptions options;
  options.run.launch.num_gpus = 4;
  ddpkit::LaunchEnvironment alone;
  alone.launcher = "torchrun";
  ddpkit::LaunchEnvironment last;
  last.rank = last.local_rank = 3;
  last.world_size = last.local_world_size = 4;
  CHECK_THROWS_AS(clstm_ppo::choose_device(options, alone, 8), ddpkit::train::UsageError);
  CHECK_THROWS_WITH(clstm_ppo::choose_device(options, alone, 8),
                    ContainsSubstring("--num-gpus 4: only 1 rank runs on this host, one per GPU") &&
                        ContainsSubstring("ddpkit run -n 4"));
  CHECK(clstm_ppo::choose_device(options, last, 8) == c10::Device(c10::kCUDA, 3));
  options.run.backend = "gloo";
  CHECK_THROWS_WITH(clstm_ppo::choose_device(options, last, 8), ContainsSubstring("--backend gloo trains on the CPU"));
  options.run.launch.num_gpus = -1;
  CHECK(clstm_ppo::choose_device(options, last, 8) == c10::kCPU);
  options.run.backend.clear();
  CHECK(clstm_ppo::choose_device(options, alone, 8) == c10::Device(c10::kCUDA, 0));
}
