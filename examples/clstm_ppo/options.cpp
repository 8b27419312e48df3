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
  app.add_option("--test-share", options.test_share, "Share of the days, at the end, held out from training")
      ->check(share(0.01, 0.9))
      ->type_name("X")
      ->group(data);
  app.add_flag("--shuffle-prices", options.shuffle_prices,
               "Control experiment: shuffle the days' moves, so that there is no pattern to learn")
      ->group(data);
}

void add_market_options(CLI::App& app, TrainOptions& options) {
  const std::string trading = "Trading";
  app.add_option("--initial-cash", options.initial_cash, "Initial cash")
      ->check(number_between(1.0, 1e12))
      ->type_name("X")
      ->group(trading);
  app.add_option("--hmax", options.hmax, "Most shares of an asset that a step trades [the portfolio's value]")
      ->check(number_between(1e-9, 1e12))
      ->type_name("N")
      ->group(trading);
  app.add_option("--cost", options.cost, "Trading cost, as a share of the traded value")
      ->check(share(0, 0.5))
      ->type_name("X")
      ->group(trading);
  app.add_option("--turbulence-share", options.turbulence_share,
                 "Share of the training days that count as calm; on more turbulent days everything is sold; 1: never")
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
  app.add_flag("--amp,!--no-amp", options.amp,
               "Mixed precision with loss scaling, if the device supports it efficiently [on]")
      ->group(devices);
  app.add_flag("--tf32,!--no-tf32", options.tf32, "TensorFloat-32 on GPUs that have it [on]")->group(devices);
  app.add_flag("--cudnn-benchmark,!--no-cudnn-benchmark", options.cudnn_benchmark,
               "Let cuDNN benchmark algorithms on GPUs; runs then differ in the last bits [on]")
      ->group(devices);
}

void add_learning_options(CLI::App& app, TrainOptions& options) {
  const std::string training = "Training";
  app.add_option("--num-episodes", options.num_episodes, "Episodes, over all ranks")
      ->check(whole_number(1, 1'000'000'000))
      ->type_name("N")
      ->group(training);
  app.add_option("--envs", options.envs, "Parallel episodes per rank and round")
      ->check(count(1))
      ->type_name("N")
      ->group(training);
  app.add_option("--episode-steps", options.episode_steps, "Days per episode, a multiple of --sequence")
      ->check(count(1))
      ->type_name("N")
      ->group(training);
  app.add_option("--sequence", options.sequence, "Days of backpropagation through time")
      ->check(count(1))
      ->type_name("N")
      ->group(training);
  app.add_option("--grad-accum-steps", options.grad_accum_steps, "Batches per update")
      ->check(count(1))
      ->type_name("N")
      ->group(training);
  app.add_option("--ppo-epochs", options.ppo_epochs, "Passes over the episodes of a round")
      ->check(count(1))
      ->type_name("N")
      ->group(training);
  app.add_flag("--lr-decay,!--no-lr-decay", options.lr_decay, "Decay the learning rate along half a cosine [on]")
      ->group(training);
  const std::string ppo = "PPO";
  app.add_option("--clip", options.ppo.clip, "Range of the ratio around 1")
      ->check(share(0.001, 1))
      ->type_name("X")
      ->group(ppo);
  app.add_option("--gamma", options.ppo.gamma, "Discount per day")->check(share())->type_name("X")->group(ppo);
  app.add_option("--gae-lambda", options.ppo.gae_lambda, "Lambda of the advantage estimates")
      ->check(share())
      ->type_name("X")
      ->group(ppo);
  app.add_option("--entropy", options.ppo.entropy, "Weight of the entropy")->check(share())->type_name("X")->group(ppo);
  app.add_option("--value", options.ppo.value, "Weight of the value loss")
      ->check(share(0, 100))
      ->type_name("X")
      ->group(ppo);
  app.add_option("--max-grad-norm", options.ppo.max_grad_norm, "Clip the gradient norm to X")
      ->check(number_between(1e-6, 1e6))
      ->type_name("X")
      ->group(ppo);
  app.add_option("--reward-scale", options.reward_scale, "Factor of the rewards; a reward of 1 is a doubling")
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
  app.get_option("--batch-size")->description("Days per batch, on each device");
  app.get_option("--json")->description("Print one line of JSON per round; the last line, the result, is text");
  add_data_options(app, options);
  add_market_options(app, options);
  add_device_options(app, options);
  add_learning_options(app, options);
  const std::string model = "Model";
  app.add_option("--window", options.window, "Days of states that the first LSTM reads")
      ->check(whole_number(1, 10'000))
      ->type_name("N")
      ->group(model);
  app.add_option("--hidden", options.hidden, "Hidden size of each LSTM")
      ->check(whole_number(1, 65'536))
      ->type_name("N")
      ->group(model);
  app.add_option("--log-std", options.log_std, "Initial logarithm of the actions' standard deviation")
      ->check(number_between(-10.0, 3.0))
      ->type_name("X")
      ->group(model);
  const std::string run = "Run";
  app.add_option("--evaluate-every", options.evaluate_every,
                 "Evaluate on the held-out days every N rounds; 0: at the end")
      ->check(count(0))
      ->type_name("N")
      ->group(run);
  app.add_flag("--tensorboard", options.tensorboard, "Write events to SAVE_DIR/tensorboard")
      ->needs(app.get_option("--save-dir"))
      ->group(run);
  app.add_option("--plot", options.plot, "File of the equity curve on the held-out days [SAVE_DIR/equity.svg]")
      ->type_name("FILE.svg")
      ->group(run);
}

CLI::App* add_generate_command(CLI::App& app, std::string& folder, GenerateOptions& options) {
  CLI::App* generate = app.add_subcommand("generate", "Write synthetic prices with a learnable pattern");
  generate->option_defaults()->always_capture_default();
  generate->add_option("folder", folder, "New folder")->required()->type_name("FOLDER");
  generate->add_option("--assets", options.assets, "Assets")->check(whole_number(1, 1000))->type_name("N");
  generate->add_option("--days", options.days, "Days")->check(whole_number(2, 1'000'000))->type_name("N");
  generate->add_option("--swing", options.swing, "Largest expected return per day")
      ->check(share(0, 0.2))
      ->type_name("X");
  generate->add_option("--period", options.period, "Mean length of a cycle, in days")
      ->check(number_between(2.0, 1e6))
      ->type_name("X");
  generate->add_option("--wander", options.wander, "Standard deviation of the phase's daily change, in radians")
      ->check(share(0, 3))
      ->type_name("X");
  generate->add_option("--noise", options.noise, "Standard deviation of a day's return around its expectation")
      ->check(share(0, 0.2))
      ->type_name("X");
  generate->add_option("--seed", options.seed, "The same seed gives the same prices")
      ->check(whole_number(0))
      ->type_name("N");
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
