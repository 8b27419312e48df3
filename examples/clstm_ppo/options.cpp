#include "clstm_ppo/options.h"

namespace clstm_ppo {

void declare(ddpkit::train::Options& options, TrainOptions& ppo) {
  options.section("data");
  options
      .add("data", &ppo.data,
           "Folder with NAME.csv (Date,Open,High,Low,Close,Volume) of each asset; by default data/planted, generated")
      .may_differ();
  options.add("assets", &ppo.assets, "Files of the folder, without .csv; by default all").may_differ();
  options.add("test_share", &ppo.test_share, "Share of the days, at the end, held out from training")
      .between(0.01, 0.9);
  options.add("shuffle_prices", &ppo.shuffle_prices,
              "Control experiment: shuffle the days' moves, so that there is no pattern to learn");

  options.section("trading");
  options.add("initial_cash", &ppo.initial_cash, "Initial cash").between(1, 1e12);
  options.add("hmax", &ppo.hmax, "Most shares of an asset that a step trades; by default the portfolio's value")
      .between(1e-9, 1e12);
  options.add("cost", &ppo.cost, "Trading cost, as a share of the traded value").between(0, 0.5);
  options
      .add("turbulence_share", &ppo.turbulence_share,
           "Share of the training days that count as calm; on more turbulent days everything is sold; 1: never")
      .between(0.5, 1);

  options.section("model");
  options.add("window", &ppo.window, "Days of states that the first LSTM reads").between(1, 10'000);
  options.add("hidden", &ppo.hidden, "Hidden size of each LSTM").between(1, 65'536);
  options.add("log_std", &ppo.log_std, "Initial logarithm of the actions' standard deviation").between(-10, 3);

  options.section("training");
  options.add("num_episodes", &ppo.num_episodes, "Episodes, over all ranks").between(1, 1e9).may_differ();
  options.add("envs", &ppo.envs, "Parallel episodes per rank and round").between(1, 1e6);
  options.add("episode_steps", &ppo.episode_steps, "Days per episode, a multiple of --sequence").between(1, 1e6);
  options.add("sequence", &ppo.sequence, "Days of backpropagation through time").between(1, 1e6);
  options.add("ppo_epochs", &ppo.ppo_epochs, "Passes over the episodes of a round").between(1, 1e6);
  options.add("lr_decay", &ppo.lr_decay, "Decay the learning rate along half a cosine");
  options.add("reward_scale", &ppo.reward_scale, "Factor of the rewards; a reward of 1 is a doubling")
      .between(1e-6, 1e6);
  options.add("clip", &ppo.ppo.clip, "Range of the ratio around 1").between(0.001, 1);
  options.add("gamma", &ppo.ppo.gamma, "Discount per day").between(0, 1);
  options.add("gae_lambda", &ppo.ppo.gae_lambda, "Lambda of the advantage estimates").between(0, 1);
  options.add("entropy", &ppo.ppo.entropy, "Weight of the entropy").between(0, 1);
  options.add("value", &ppo.ppo.value, "Weight of the value loss").between(0, 100);
  ddpkit::train::declare(options, ppo.run);
  options.remove({"epochs", "lr_scaling", "lr_schedule", "warmup_epochs", "weight_decay", "max_grad_norm",
                  "num_workers", "sync_batchnorm", "save_steps", "logging_steps"});
  options.at("batch_size").help("Days per batch on each device");
  options.at("json").help("Print one line of JSON per round; the last line, the result, is text");
  options.section("training");
  options.add("max_grad_norm", &ppo.ppo.max_grad_norm, "Clip the gradient norm to X").between(1e-6, 1e6);

  options.section("distributed");
  options.add("threads", &ppo.threads, "Threads per rank on the CPU; these LSTMs are too small for several threads")
      .between(1, 1024)
      .may_differ();
  options.add("tf32", &ppo.tf32, "TensorFloat-32 on GPUs that have it").may_differ();
  options
      .add("cudnn_benchmark", &ppo.cudnn_benchmark,
           "Let cuDNN benchmark algorithms on GPUs; runs then differ in the last bits")
      .may_differ();

  options.section("run");
  options.add("eval_every", &ppo.eval_every, "Evaluate on the held-out days every N rounds; 0: at the end")
      .between(0, 1e6)
      .also("evaluate_every")
      .may_differ();
  options.add("plot", &ppo.plot, "SVG file of the equity curve on the held-out days; by default SAVE_DIR/equity.svg")
      .may_differ();
}

void declare(ddpkit::train::Options& options, std::string& folder, GenerateOptions& set) {
  options.add("folder", &folder, "New folder").positional().required();
  options.add("assets", &set.assets, "Assets").between(1, 1000);
  options.add("days", &set.days, "Days").between(2, 1e6);
  options.add("swing", &set.swing, "Largest expected return per day").between(0, 0.2);
  options.add("period", &set.period, "Mean length of a cycle, in days").between(2, 1e6);
  options.add("wander", &set.wander, "Standard deviation of the phase's daily change, in radians").between(0, 3);
  options.add("noise", &set.noise, "Standard deviation of a day's return around its expectation").between(0, 0.2);
  options.add("seed", &set.seed, "The same seed gives the same prices");
}

}  // namespace clstm_ppo
