// Classifies the behaviour of a mouse in short video clips, on one or several ranks.
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include <ddpkit/train/main.h>

#include "video/options.h"
#include "video/trainer.h"

int main(int argc, char** argv) {
  CLI::App app("Video behaviour: trains a 3D-CNN on clips of videos, on one rank or, under a launcher, many.", "video");
  video::TrainOptions options;
  std::string folder;
  video::GenerateOptions generate_options;
  const CLI::App* generate = video::add_generate_command(app, folder, generate_options);
  video::add_train_options(app, options);
  // `video train ...` is the same as `video ...`. `train` has no options, so that a config file works for both.
  std::vector<const char*> arguments(argv, argv + argc);
  if (argc > 1 && std::string(argv[1]) == "train") arguments.erase(arguments.begin() + 1);
  return ddpkit::train::run_main(app, static_cast<int>(arguments.size()), arguments.data(),
                                 [&](ddpkit::train::Program& program) {
                                   if (generate->parsed()) return video::generate(folder, generate_options);
                                   if (options.data.empty())
                                     throw ddpkit::train::UsageError("--data FOLDER is required");
                                   video::train(options, program);
                                 });
}
