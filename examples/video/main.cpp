// Classifies the behaviour of a mouse in short video clips, on one or several ranks.
#include <string>

#include <ddpkit/train/main.h>

#include "video/options.h"
#include "video/trainer.h"

int main(int argc, char** argv) {
  ddpkit::train::Options options("video", "Trains a 3D-CNN on clips of videos, on one rank or several.");
  video::TrainOptions video;
  video::declare(options, video);
  options.command("train", "Train a model (the default command)", /*inherits=*/true);
  std::string folder;
  video::GenerateOptions set;
  ddpkit::train::Options& generate =
      options.command("generate", "Write a synthetic data set: videos, trials.csv, classes.txt");
  video::declare(generate, folder, set);
  const auto body = [&](ddpkit::train::Program& program) {
    if (generate.is_chosen()) return video::generate(folder, set);
    video::train(video, options, program);
  };
  return ddpkit::train::run_main(options, argc, argv, body);
}
