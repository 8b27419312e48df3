#include "clstm_ppo/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>

namespace clstm_ppo {
namespace {

using ddpkit::train::number_between;
using ddpkit::train::whole_number;

CLI::Validator count(int least) { return whole_number(least, 1'000'000); }
CLI::Validator share(double least = 0, double most = 1) { return number_between(least, most); }

void add_data_options(CLI::App& app, TrainOptions& options) {
  const std::string data = "Data";
  app.add_option("--assets", options.assets, "Files of the folder, without .csv [all]")
      ->delimiter(',')
      ->type_name("NAME,...")
      ->group(data);
  app.add_option("--test-share", options.test_share, "Share of the days, the last ones, that training never sees")
      ->check(share(0.01, 0.9))
      ->type_name("X")
      ->group(data);
  app.add_flag("--shuffle-prices", options.shuffle_prices,
               "Control: each day's move comes on another day, so that there is nothing to learn")
      ->group(data);
}

void add_market_options(CLI::App& app, TrainOptions& options) {
  const std::string trading = "Trading";
  app.add_option("--initial-cash", options.initial_cash, "Money to begin with")
      ->check(number_between(1.0, 1e12))
      ->type_name("X")
      ->group(trading);
  app.add_option("--hmax", options.hmax, "The most shares of an asset that a step trades [what the portfolio is worth]")
      ->check(number_between(1e-9, 1e12))
      ->type_name("N")
      ->group(trading);
  app.add_option("--cost", options.cost, "Of what is traded, as a share")
      ->check(share(0, 0.5))
      ->type_name("X")
      ->group(trading);
  app.add_option("--turbulence-share", options.turbulence_share,
                 "Share of the training days that are calm: on wilder ones everything is sold; 1: never")
      ->check(share(0.5, 1))
      ->type_name("X")
      ->group(trading);
}

void add_device_options(CLI::App& app, TrainOptions& options) {
  const std::string devices = "Devices";
  app.add_option("--num-gpus", options.num_gpus, "GPUs to use per host, one per rank; -1: all; 0: the CPU")
      ->check(whole_number(-1, 1024))
      ->type_name("N")
      ->group(devices);
  app.add_option("--threads", options.threads,
                 "Threads per rank on the CPU; these LSTMs are too small for several threads")
      ->check(whole_number(1, 1024))
      ->type_name("N")
      ->group(devices);
  app.add_flag("--amp,!--no-amp", options.amp, "Mixed precision, with loss scaling, where the device gains by it [on]")
      ->group(devices);
  app.add_flag("--tf32,!--no-tf32", options.tf32, "TensorFloat-32 on GPUs that have it [on]")->group(devices);
  app.add_flag("--cudnn-benchmark,!--no-cudnn-benchmark", options.cudnn_benchmark,
               "Let cuDNN try algorithms, on GPUs; runs then differ in the last bits [on]")
      ->group(devices);
}

void add_learning_options(CLI::App& app, TrainOptions& options) {
  const std::string training = "Training";
  app.add_option("--num-episodes", options.num_episodes, "Episodes, of all ranks together")
      ->check(whole_number(1, 1'000'000'000))
      ->type_name("N")
      ->group(training);
  app.add_option("--envs", options.envs, "Episodes that a rank runs side by side before it learns from them")
      ->check(count(1))
      ->type_name("N")
      ->group(training);
  app.add_option("--episode-steps", options.episode_steps, "Days of an episode, a multiple of --sequence")
      ->check(count(1))
      ->type_name("N")
      ->group(training);
  app.add_option("--sequence", options.sequence, "Days over which gradients go back")
      ->check(count(1))
      ->type_name("N")
      ->group(training);
  app.add_option("--grad-accum-steps", options.grad_accum_steps, "Batches whose gradients make one update")
      ->check(count(1))
      ->type_name("N")
      ->group(training);
  app.add_option("--ppo-epochs", options.ppo_epochs, "Passes over the episodes of a round")
      ->check(count(1))
      ->type_name("N")
      ->group(training);
  app.add_flag("--lr-decay,!--no-lr-decay", options.lr_decay, "The learning rate falls along half a cosine [on]")
      ->group(training);
  const std::string ppo = "PPO";
  app.add_option("--clip", options.ppo.clip, "Range of the ratio around 1")
      ->check(share(0.001, 1))
      ->type_name("X")
      ->group(ppo);
  app.add_option("--gamma", options.ppo.gamma, "Discount of a day")->check(share())->type_name("X")->group(ppo);
  app.add_option("--gae-lambda", options.ppo.gae_lambda, "Of the advantage estimates")
      ->check(share())
      ->type_name("X")
      ->group(ppo);
  app.add_option("--entropy", options.ppo.entropy, "Weight of the entropy")->check(share())->type_name("X")->group(ppo);
  app.add_option("--value", options.ppo.value, "Weight of the value's loss")
      ->check(share(0, 100))
      ->type_name("X")
      ->group(ppo);
  app.add_option("--max-grad-norm", options.ppo.max_grad_norm, "Longer gradients are shortened to it")
      ->check(number_between(1e-6, 1e6))
      ->type_name("X")
      ->group(ppo);
  app.add_option("--reward-scale", options.reward_scale, "What a reward of 1, a doubling, counts as")
      ->check(number_between(1e-6, 1e6))
      ->type_name("X")
      ->group(ppo);
}

}  // namespace

void add_train_options(CLI::App& app, TrainOptions& options) {
  app.add_option("--data", options.data, "Folder with NAME.csv (Date,Open,High,Low,Close,Volume) of each asset")
      ->type_name("FOLDER");
  ddpkit::train::add_trainer_options(app, options.trainer);
  // A run counts rounds and writes a checkpoint after each.
  ddpkit::train::add_checkpoint_options(app, options.trainer);
  for (const char* name : {"--epochs", "--checkpoint-steps"}) app.remove_option(app.get_option(name));
  app.get_option("--batch-size")->description("Days a batch, on each device");
  app.get_option("--json")->description(
      "Print one line of JSON a finished round; the last line, the result, stays text");
  add_data_options(app, options);
  add_market_options(app, options);
  add_device_options(app, options);
  add_learning_options(app, options);
  const std::string model = "Model";
  app.add_option("--window", options.window, "Days of states that the first LSTM reads")
      ->check(whole_number(1, 10'000))
      ->type_name("N")
      ->group(model);
  app.add_option("--hidden", options.hidden, "Numbers that each LSTM remembers")
      ->check(whole_number(1, 65'536))
      ->type_name("N")
      ->group(model);
  app.add_option("--log-std", options.log_std, "Logarithm of the actions' deviation, to begin with")
      ->check(number_between(-10.0, 3.0))
      ->type_name("X")
      ->group(model);
  const std::string run = "Run";
  app.add_option("--evaluate-every", options.evaluate_every,
                 "Evaluate on the held-out days every N rounds; 0: at the end")
      ->check(count(0))
      ->type_name("N")
      ->group(run);
  app.add_flag("--tensorboard", options.tensorboard, "Leave events in SAVE_DIR/tensorboard")
      ->needs(app.get_option("--save-dir"))
      ->group(run);
  app.add_option("--plot", options.plot, "Equity curve on the unseen days [SAVE_DIR/equity.svg]")
      ->type_name("FILE.svg")
      ->group(run);
}

CLI::App* add_generate_command(CLI::App& app, std::string& folder, GenerateOptions& options) {
  CLI::App* generate = app.add_subcommand("generate", "Write prices with a pattern that can be learnt");
  generate->option_defaults()->always_capture_default();
  generate->add_option("folder", folder, "New folder")->required()->type_name("FOLDER");
  generate->add_option("--assets", options.assets, "Assets")->check(whole_number(1, 1000))->type_name("N");
  generate->add_option("--days", options.days, "Days")->check(whole_number(2, 1'000'000))->type_name("N");
  generate->add_option("--swing", options.swing, "The most that is expected of a day")
      ->check(share(0, 0.2))
      ->type_name("X");
  generate->add_option("--period", options.period, "Days of a swing, on average")
      ->check(number_between(2.0, 1e6))
      ->type_name("X");
  generate->add_option("--wander", options.wander, "By which its phase strays each day, radians")
      ->check(share(0, 3))
      ->type_name("X");
  generate->add_option("--noise", options.noise, "Deviation of a day's return from what is expected")
      ->check(share(0, 0.2))
      ->type_name("X");
  generate->add_option("--seed", options.seed, "Same seed, same prices")->check(whole_number(0))->type_name("N");
  return generate;
}

std::vector<std::string> with_dashes(int argc, const char* const* argv) {
  std::vector<std::string> arguments(argv, argv + argc);
  for (std::string& argument : arguments) {
    if (!argument.starts_with("--")) continue;
    const auto end = argument.begin() + static_cast<std::ptrdiff_t>(std::min(argument.find('='), argument.size()));
    std::replace(argument.begin(), end, '_', '-');
  }
  return arguments;
}

}  // namespace clstm_ppo
