// Trains a trading policy on one or several ranks.
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include <ddpkit/train/main.h>

#include "clstm_ppo/options.h"
#include "clstm_ppo/trainer.h"

int main(int argc, char** argv) {
  CLI::App app(
      "Trading by reinforcement learning: cascaded LSTMs trained by PPO, on one rank or, under a launcher, many.",
      "clstm_ppo");
  clstm_ppo::TrainOptions options;
  std::string folder;
  clstm_ppo::GenerateOptions generate_options;
  const CLI::App* generate = clstm_ppo::add_generate_command(app, folder, generate_options);
  clstm_ppo::add_train_options(app, options);
  const std::vector<std::string> arguments = clstm_ppo::with_dashes(argc, argv);
  std::vector<const char*> pointers;
  for (const std::string& argument : arguments) pointers.push_back(argument.c_str());
  return ddpkit::train::run_main(app, argc, pointers.data(), [&](ddpkit::train::Program& program) {
    if (generate->parsed()) return clstm_ppo::generate(folder, generate_options);
    if (options.data.empty()) throw ddpkit::train::UsageError("--data FOLDER is required");
    clstm_ppo::DistributedCLSTMPPOTrainer trainer(options, program);
    trainer.initialize();
    trainer.train();
  });
}
