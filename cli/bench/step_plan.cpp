#include "step_plan.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/parse_number.h>

namespace ddpkit::bench {
namespace {

constexpr std::pair<std::string_view, MlpShape> kNamedMlps[] = {
    {"mlp-10k", {16, 3}}, {"mlp-106k", {128, 3}}, {"mlp-1m", {600, 3}}, {"mlp-7.6m", {1500, 4}}, {"mlp-50m", {4000, 4}},
};

/// The default of PyTorch and of ddpkit.
constexpr double kFirstBucketMb = 1;
constexpr double kNoCapMb = 1 << 20;

}  // namespace

std::optional<MlpShape> mlp_shape(std::string_view model) {
  if (model == "cnn" || model == "lstm" || has_checkpoints(model)) return std::nullopt;
  std::string names;
  for (const auto& [name, shape] : kNamedMlps) {
    if (name == model) return shape;
    names += std::string(name) + ", ";
  }
  MlpShape shape;
  const std::size_t x = model.find('x');
  const bool is_shape = model.starts_with("mlp-") && x != std::string_view::npos &&
                        parse_number(model.substr(4, x - 4), shape.hidden) &&
                        parse_number(model.substr(x + 1), shape.layers);
  if (!is_shape || shape.hidden < 1 || shape.hidden > 65536 || shape.layers < 1 || shape.layers > 1024)
    throw InvalidArgument(
        fmt::format("there is no model \"{}\"; there are {}mlp-HIDDENxLAYERS, cnn, lstm, transformer, transformer-25m",
                    model, names));
  return shape;
}

bool has_checkpoints(std::string_view model) { return model == "transformer" || model == "transformer-25m"; }

std::string model_argument(std::string_view model) {
  const auto shape = mlp_shape(model);
  return shape ? fmt::format("mlp-{}x{}", shape->hidden, shape->layers) : std::string(model);
}

BucketCaps bucket_caps(std::string_view text) {
  if (text == "default") return {};
  if (text == "one") return {kNoCapMb, kNoCapMb};
  double cap = 0;
  if (!parse_number(text, cap) || !(cap > 0) || cap > kNoCapMb)
    throw InvalidArgument(fmt::format(
        "\"{}\" is no bucket cap: write a number of MiB, \"default\", or \"one\" for a single bucket", text));
  return {cap, std::min(cap, kFirstBucketMb)};
}

void declare(train::Options& options, StepPlan& plan) {
  options.add(
      "model", &plan.models,
      "mlp-10k, mlp-106k, mlp-1m, mlp-7.6m, mlp-50m, mlp-HIDDENxLAYERS, cnn, lstm, transformer, transformer-25m");
  options.add("batch_size", &plan.batch, "Samples per rank").between(1, 1 << 20).also("batch");
  options.add("optimizer", &plan.optimizer, "sgd or adamw").one_of({"sgd", "adamw"});
  options
      .add("update", &plan.updates,
           "How weights are updated: torch (torch::optim), fused (ddpkit's optimizers), sharded (over the ranks), "
           "in-backward (sharded, each bucket after its reduction), graphed (fused, the step as one CUDA graph), fsdp "
           "(sharded, the weights too) "
           "(default: torch; with adamw all updates of the CPU except fsdp; with cuda torch, fused, graphed)")
      .one_of({kTorchUpdate, kFusedUpdate, kShardedUpdate, kInBackwardUpdate, kGraphedUpdate, kFsdpUpdate});
  options.add("bucket_cap_mb", &plan.bucket_caps_mb,
              "Bucket caps in MiB to compare; \"default\"; or \"one\" for a single bucket");
  options.add("device", &plan.device, "cpu or cuda, one GPU per rank").one_of({"cpu", "cuda"});
  options.add("activation_checkpoint", &plan.activation_checkpoint,
              "Also measure one rank that runs the layers of a transformer again in backward");
  options.add("no_pin", &plan.no_pin, "Do not pin ranks to cores (default: one core per rank if there are enough)");
}

std::vector<std::string> updates_of(const StepPlan& plan) {
  if (!plan.updates.empty()) return plan.updates;
  if (plan.device != "cpu") return {kTorchUpdate, kFusedUpdate, kGraphedUpdate};
  if (plan.optimizer == "sgd") return {kTorchUpdate};
  return {kTorchUpdate, kFusedUpdate, kShardedUpdate, kInBackwardUpdate};
}

std::vector<std::string> to_arguments(const StepPlan& plan, const std::string& model) {
  std::vector<std::string> arguments = {"--model",     model_argument(model), "--batch",  std::to_string(plan.batch),
                                        "--optimizer", plan.optimizer,        "--device", plan.device};
  if (plan.no_pin) arguments.emplace_back("--no-pin");
  return arguments;
}

}  // namespace ddpkit::bench
