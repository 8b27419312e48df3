// Trains a trading policy on one or several ranks.
#include <string>

#include <ddpkit/train/main.h>

#include "clstm_ppo/options.h"
#include "clstm_ppo/trainer.h"

int main(int argc, char** argv) {
  ddpkit::train::Options options(
      "clstm_ppo", "Trading by reinforcement learning: cascaded LSTMs trained by PPO, on one rank or several.");
  clstm_ppo::TrainOptions ppo;
  clstm_ppo::declare(options, ppo);
  options.command("train", "Train a policy (the default command)", /*inherits=*/true);
  std::string folder;
  clstm_ppo::GenerateOptions set;
  ddpkit::train::Options& generate = options.command("generate", "Write synthetic prices with a learnable pattern");
  clstm_ppo::declare(generate, folder, set);
  const auto body = [&](ddpkit::train::Program& program) {
    if (generate.is_chosen()) return clstm_ppo::generate(folder, set);
    clstm_ppo::DistributedCLSTMPPOTrainer trainer(ppo, program);
    trainer.initialize();
    trainer.train();
  };
  return ddpkit::train::run_main(options, argc, argv, body);
}
