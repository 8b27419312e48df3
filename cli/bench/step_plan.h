// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ddpkit/train/options.h>

namespace ddpkit::bench {

/// The options of `ddpkit bench step`. Each measuring process receives one model and one bucket cap.
struct StepPlan {
  std::vector<std::string> models = {"mlp-10k", "mlp-106k", "mlp-1m", "mlp-7.6m", "mlp-50m"};
  std::int64_t batch = 32;  ///< Samples per rank.
  std::string optimizer = "sgd";
  std::vector<std::string> updates = {};  ///< Of `kUpdates`; empty: updates_of() the optimizer.
  std::vector<std::string> bucket_caps_mb = {"default"};
  std::string device = "cpu";  ///< Or "cuda": rank r trains on GPU r.
  int ranks = 0;               ///< 0: ranks_on() the device.
  int steps = 0;               ///< Timed steps per system, over all rounds. 0: as many as fit into `kTurnSeconds`.
  bool no_pin = false;         ///< Do not pin ranks to cores.
  bool activation_checkpoint = false;  ///< Of each layer; for transformers.
};

/// Number of rounds. The systems take turns in each round, so a disturbance of the machine affects all systems.
inline constexpr int kRounds = 10;
/// Minimum number of rounds per start.
inline constexpr int kRoundsAStart = 4;
/// Approximate duration of one system's turn.
inline constexpr double kTurnSeconds = 0.15;

/// The kinds of update: torch::optim; ddpkit's fused optimizer; the fused optimizer sharded over the ranks; the sharded
/// optimizer within backward; the fused optimizer in a step that is one CUDA graph; weights that are sharded too.
inline constexpr const char* kTorchUpdate = "torch";
inline constexpr const char* kFusedUpdate = "fused";
inline constexpr const char* kShardedUpdate = "sharded";
inline constexpr const char* kInBackwardUpdate = "in-backward";
inline constexpr const char* kGraphedUpdate = "graphed";
inline constexpr const char* kFsdpUpdate = "fsdp";

/// Returns the updates to measure: those of the plan, if any. Default on GPUs: torch, fused and graphed. Default on the
/// CPU: all updates of the CPU except fsdp for adamw, only torch for sgd.
std::vector<std::string> updates_of(const StepPlan& plan);

/// The hidden layers of an MLP: 561 inputs, `layers` times `hidden` with ReLU, 6 classes.
struct MlpShape {
  std::int64_t hidden = 0;
  int layers = 0;
};

/// Returns the shape of "mlp-106k", of the other named MLPs and of "mlp-HIDDENxLAYERS". Empty for "cnn", "lstm",
/// "transformer" and "transformer-25m". Throws InvalidArgument for an unknown model.
std::optional<MlpShape> mlp_shape(std::string_view model);

/// Returns the model's name for the measuring processes (C++ and Python): "mlp-HIDDENxLAYERS" for an MLP.
std::string model_argument(std::string_view model);

/// Bucket caps of a DistributedDataParallel. Empty: the default.
struct BucketCaps {
  std::optional<double> bucket_cap_mb;
  /// Cap of the first bucket, at most `bucket_cap_mb`.
  std::optional<double> first_bucket_cap_mb;
};

/// Parses "default", "one" (a single bucket), or a number of MiB. Throws InvalidArgument.
BucketCaps bucket_caps(std::string_view text);

/// Declares the options that the command and its processes share.
void declare(train::Options& options, StepPlan& plan);

/// Returns whether the model has layers for `activation_checkpoint`.
bool has_checkpoints(std::string_view model);

/// Returns the arguments for one process of one system, in the format of declare(). Without `activation_checkpoint`.
std::vector<std::string> to_arguments(const StepPlan& plan, const std::string& model);

}  // namespace ddpkit::bench
