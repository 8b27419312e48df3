// Human activity recognition from a wearable sensor, on one or several ranks.
#include <CLI/CLI.hpp>
#include <string>

#include "har/generate.h"
#include "har/options.h"
#include "har/trainer.h"

namespace {

using ddpkit::train::whole_number;

CLI::App* add_generate(CLI::App& app, std::string& folder, har::GenerateOptions& options) {
  CLI::App* generate = app.add_subcommand("generate", "Write a synthetic data set in the UCI-HAR layout");
  generate->option_defaults()->always_capture_default();
  generate->add_option("folder", folder, "New folder")->required()->type_name("FOLDER");
  const auto count = whole_number(1, 1'000'000);
  generate->add_option("--train", options.train, "Training windows")->check(count)->type_name("N");
  generate->add_option("--test", options.test, "Test windows")->check(count)->type_name("N");
  generate->add_option("--steps", options.steps, "Samples a window, at 50 Hz")
      ->check(whole_number(1, 100'000))
      ->type_name("N");
  generate->add_option("--seed", options.seed, "The same seed gives the same files")
      ->check(whole_number(0))
      ->type_name("N");
  return generate;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Human activity recognition: trains a classifier of sensor windows, on one rank or, under a launcher, many.",
      "har");
  har::TrainOptions options;
  std::string folder;
  har::GenerateOptions generate_options;
  const CLI::App* generate = add_generate(app, folder, generate_options);
  har::add_train_options(app, options);
  return ddpkit::train::run_main(app, argc, argv, [&](ddpkit::train::Program& program) {
    if (generate->parsed()) return har::generate_ucihar(folder, generate_options);
    if (options.data.empty()) throw ddpkit::train::UsageError("--data FOLDER is required");
    har::train(options, program);
  });
}
