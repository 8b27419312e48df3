// Human activity recognition from a wearable sensor, on one or several ranks.
#include <string>

#include <ddpkit/train/main.h>

#include "har/generate.h"
#include "har/options.h"
#include "har/trainer.h"

int main(int argc, char** argv) {
  ddpkit::train::Options options("har", "Trains a classifier of motion-sensor windows, on one rank or several.");
  har::TrainOptions har;
  har::declare(options, har);
  options.command("train", "Train a model (the default command)", /*inherits=*/true);

  std::string folder;
  har::GenerateOptions set;
  ddpkit::train::Options& generate = options.command("generate", "Write a synthetic data set in the UCI-HAR layout");
  generate.add("folder", &folder, "New folder").positional().required();
  generate.add("train", &set.train, "Training windows").between(1, 1e6);
  generate.add("test", &set.test, "Test windows").between(1, 1e6);
  generate.add("steps", &set.steps, "Samples per window, at 50 Hz").between(1, 1e5);
  generate.add("seed", &set.seed, "The same seed gives the same files");

  const auto body = [&](ddpkit::train::Program& program) {
    if (generate.is_chosen()) return har::generate_ucihar(folder, set);
    har::train(har, options, program);
  };
  return ddpkit::train::run_main(options, argc, argv, body);
}
