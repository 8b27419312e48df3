// Tells apart what a person does by what a worn sensor feels; on one rank or many.
#include <CLI/CLI.hpp>
#include <map>
#include <string>

#include "har/generate.h"
#include "har/trainer.h"

namespace {

template <class E>
void add_choice(CLI::App& app, const std::string& name, E& value, const std::map<std::string, E>& choices,
                const std::string& description) {
  const auto to_number = [choices](std::string& text) {
    const auto found = choices.find(text);
    if (found != choices.end()) {
      text = std::to_string(static_cast<int>(found->second));
      return std::string();
    }
    std::string names;
    for (const auto& choice : choices) names += (names.empty() ? "" : ", ") + choice.first;
    return "must be one of " + names + ", not " + text;
  };
  app.add_option(name, value, description)->transform(CLI::Validator(to_number, ""))->type_name("NAME")->group("Model");
}

void add_train_options(CLI::App& app, har::TrainOptions& options) {
  app.add_option("--data", options.data, "Folder in the UCI-HAR layout, or with NAME_TRAIN.ts and NAME_TEST.ts")
      ->type_name("FOLDER");
  ddpkit::train::add_trainer_options(app, options.trainer);
  app.option_defaults()->always_capture_default(false);
  add_choice<har::Mode>(app, "--mode", options.mode,
                        {{"cnn", har::Mode::kCnn}, {"lstm", har::Mode::kLstm}, {"flatten", har::Mode::kFlatten}},
                        "cnn, lstm or flatten (a perceptron on flattened windows) [cnn]");
  add_choice<har::OptimizerKind>(
      app, "--optimizer", options.optimizer,
      {{"adamw", har::OptimizerKind::kAdamW}, {"adam", har::OptimizerKind::kAdam}, {"sgd", har::OptimizerKind::kSgd}},
      "adamw, adam or sgd [adamw]");
  add_choice<har::Schedule>(app, "--lr-schedule", options.schedule,
                            {{"cosine", har::Schedule::kCosine}, {"constant", har::Schedule::kConstant}},
                            "cosine (down to 0 at the end) or constant [cosine]");
  app.option_defaults()->always_capture_default();
  app.add_option("--weight-decay", options.weight_decay, "Weight decay")
      ->check(CLI::Range(0.0, 1.0))
      ->type_name("X")
      ->group("Model");
  app.add_option("--momentum", options.momentum, "Momentum of sgd")
      ->check(CLI::Range(0.0, 1.0))
      ->type_name("X")
      ->group("Model");
  app.add_option("--dropout", options.dropout, "Share of features dropped while training")
      ->check(CLI::Range(0.0, 0.95))
      ->type_name("X")
      ->group("Model");
}

CLI::App* add_generate(CLI::App& app, std::string& folder, har::GenerateOptions& options) {
  CLI::App* generate = app.add_subcommand("generate", "Write a made-up data set in the UCI-HAR layout");
  generate->option_defaults()->always_capture_default();
  generate->add_option("folder", folder, "New folder")->required()->type_name("FOLDER");
  const auto count = CLI::Range(1, 1'000'000);
  generate->add_option("--train", options.train, "Training windows")->check(count)->type_name("N");
  generate->add_option("--test", options.test, "Test windows")->check(count)->type_name("N");
  generate->add_option("--steps", options.steps, "Samples a window, at 50 Hz")
      ->check(CLI::Range(1, 100'000))
      ->type_name("N");
  generate->add_option("--seed", options.seed, "Same seed, same files")->type_name("N");
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
  add_train_options(app, options);
  return ddpkit::train::run_main(app, argc, argv, [&](ddpkit::train::Program& program) {
    if (generate->parsed()) return har::generate_ucihar(folder, generate_options);
    if (options.data.empty()) throw ddpkit::train::UsageError("--data FOLDER is required");
    har::train(options, program);
  });
}
