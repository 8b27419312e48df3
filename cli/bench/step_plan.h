// Tier 0: the standard library only. CLI11 is declared, not included.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace CLI {
class App;
}

namespace ddpkit::bench {

/// What `ddpkit bench step` measures, as its options say. Each of its processes is told one model and one bucket cap.
struct StepPlan {
  std::vector<std::string> models = {"mlp-10k", "mlp-106k", "mlp-1m", "mlp-7.6m", "mlp-50m"};
  std::int64_t batch = 32;  ///< Samples a rank.
  std::string optimizer = "sgd";
  std::vector<std::string> updates = {};  ///< Of `kUpdates`; empty: updates_of() the optimizer.
  std::vector<std::string> bucket_caps_mb = {"default"};
  std::string device = "cpu";  ///< Or "cuda": rank r trains on GPU r.
  int ranks = 0;               ///< 0: ranks_on() the device.
  int steps = 0;        ///< Timed steps of each system, over all rounds; 0: as many as `kTurnSeconds` hold, each round.
  bool no_pin = false;  ///< Leave it to the scheduler where each rank runs.
};

/// Rounds in which the systems take turns, so that a disturbance of the machine meets all of them.
inline constexpr int kRounds = 10;
/// At least so many for each start.
inline constexpr int kRoundsAStart = 4;
/// How long one system's turn lasts, about.
inline constexpr double kTurnSeconds = 0.15;

/// How the weights are updated: by torch::optim; by ddpkit's fused optimizer; by that, sharded over the ranks; the
/// same, within backward; by the fused one in a step that is one CUDA graph.
inline constexpr const char* kTorchUpdate = "torch";
inline constexpr const char* kFusedUpdate = "fused";
inline constexpr const char* kShardedUpdate = "sharded";
inline constexpr const char* kInBackwardUpdate = "in-backward";
inline constexpr const char* kGraphedUpdate = "graphed";

/// What the plan measures: what it says; else on GPUs torch, fused and graphed; on the CPU all that it has for adamw,
/// and torch's alone for sgd.
std::vector<std::string> updates_of(const StepPlan& plan);

/// An MLP's hidden layers: 561 inputs, `layers` times `hidden` with ReLU, 6 classes.
struct MlpShape {
  std::int64_t hidden = 0;
  int layers = 0;
};

/// The shape of "mlp-106k" and its kin, and of "mlp-HIDDENxLAYERS"; nothing for "cnn", "lstm" and "transformer".
/// Throws InvalidArgument for what is no model.
std::optional<MlpShape> mlp_shape(std::string_view model);

/// The model's name as each process, of Python too, understands it: of an MLP "mlp-HIDDENxLAYERS".
std::string model_argument(std::string_view model);

/// Bucket caps of a DistributedDataParallel; nothing: its default.
struct BucketCaps {
  std::optional<double> bucket_cap_mb;
  /// The first bucket's: never above `bucket_cap_mb`.
  std::optional<double> first_bucket_cap_mb;
};

/// "default", "one" (a single bucket), or a number of MiB. Throws InvalidArgument.
BucketCaps bucket_caps(std::string_view text);

/// Options that the command and each of its processes have in common.
void add_step_options(CLI::App& command, StepPlan& plan);

/// The arguments for one process of one system: what add_step_options() reads.
std::vector<std::string> to_arguments(const StepPlan& plan, const std::string& model);

}  // namespace ddpkit::bench
