// A small GPT that learns text character by character, on one or several ranks.
#include <ddpkit/train/main.h>

#include "gpt/options.h"
#include "gpt/trainer.h"

int main(int argc, char** argv) {
  ddpkit::train::Options options("gpt", "Trains a small GPT on text, on one rank or several, and writes text.");
  gpt::TrainOptions gpt;
  gpt::declare(options, gpt);
  const auto body = [&](ddpkit::train::Program& program) { gpt::train(gpt, options, program); };
  return ddpkit::train::run_main(options, argc, argv, body);
}
