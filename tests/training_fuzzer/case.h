// A random training as data. Every field has a default, and JSON holds only other values. So a case's features are the
// keys of its JSON, and shrinking removes keys.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace ddpkit::fuzz {

/// A layer from [rows, width] to [rows, width].
struct Node {
  std::string kind = "linear";  ///< See model.cpp.
  std::string dtype = "";       ///< Of its parameters; empty: the type of the case.
  std::string layout = "";      ///< Of its weight: transposed, channels_last, sliced, flat (a view of one tensor).
  int layout_rank = -1;         ///< The layout is on this rank only; -1: on all.
  int tie = -1;                 ///< Index of a node with the same weight.
  std::string tie_by =
      "name";    ///< handle: `head->weight = wte->weight`; name: register_parameter() of the same tensor.
  int uses = 1;  ///< Number of applications of the node in a forward.
  std::string when = "always";  ///< Steps and ranks that run the node: never, even_steps, rank_0, by_rank.
  bool sparse = false;          ///< Sparse gradients of an embedding.
  bool checkpoint = false;      ///< Recomputed in backward, by a function of autograd with its own backward.
  bool recomputed = false;      ///< Recomputed in backward, by activation_checkpoint().
  bool frozen = false;          ///< requires_grad is false when the model is wrapped.
  bool ignored = false;         ///< Listed in parameters_to_ignore.
  bool detach = false;          ///< Its input is detached.
};

struct Wrapper {
  std::string kind = "ddp";  ///< fsdp; or data_parallel: one process, `world` replicas.
  double bucket_cap_mb = 25;
  bool arena = true;
  bool view = false;
  bool find_unused = false;
  bool static_graph = false;
  bool broadcast_buffers = true;
  std::string hook = "none";      ///< all_reduce, fp16, bf16, power_sgd, own, stats (own, and enables statistics).
  std::string output = "tensor";  ///< tuple, map, opaque.
  std::string units = "";         ///< Of fsdp; each: every child of the model, even: each second one, empty: none.
  double min_unit_mb = 1;
  bool reshard = true;          ///< reshard_after_forward.
  std::string scope = "whole";  ///< In which the program reads and writes parameters; gathering: only between steps.
};

struct OptimizerChoice {
  std::string kind = "sgd";      ///< adam, adamw.
  std::string engine = "torch";  ///< fused, sharded.
  int groups = 1;
  double momentum = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool amsgrad = false;
  bool maximize = false;
  bool in_backward = false;
  bool own_weights = false;  ///< Sharded, without shared weights.
  bool scaler = false;
  bool schedule = false;
};

/// One action of the training program. Fields that its kind does not use keep their defaults.
struct Event {
  std::string kind = "step";
  std::vector<int> slots = {0};  ///< Graphs that forward creates and backward uses.
  std::string how = "";
  int node = 0;
  int rank = -1;
  double value = 1;
  std::vector<int> counts = {};  ///< Number of steps per rank, in a join.
};

struct Case {
  std::uint64_t data = 1;  ///< Seed of weights and inputs.
  int world = 2;
  std::string backend = "shm";
  std::string dtype = "f64";
  std::string autocast = "";  ///< The type of mixed precision, with weights in `dtype`; empty: none.
  int width = 2;
  int rows = 2;
  double magnitude = 1;       ///< Factor of the loss.
  bool other_starts = false;  ///< Ranks start from different weights.
  bool twice = false;         ///< Ranks run the case twice and expect the same bits.
  std::vector<Node> nodes = {};
  Wrapper wrapper = {};
  OptimizerChoice optimizer = {};
  std::vector<Event> events = {};
};

inline bool is_fully_sharded(const Case& drawn) { return drawn.wrapper.kind == "fsdp"; }
/// Returns whether a new wrapper needs a new optimizer.
inline bool wraps_with_optimizer(const Case& drawn) {
  return drawn.optimizer.engine == "sharded" || is_fully_sharded(drawn);
}
/// Returns whether weights change within backward.
inline bool updates_in_backward(const Case& drawn) {
  return drawn.optimizer.in_backward && drawn.optimizer.engine == "sharded";
}

/// Deterministic: the same case on every machine.
Case draw(std::uint64_t seed, std::uint64_t number);

nlohmann::json to_json(const Case& drawn);
Case from_json(const nlohmann::json& json);

/// Returns keys and values that differ from the defaults, such as "optimizer.engine=sharded" or "event.kind=freeze".
std::set<std::string> features(const Case& drawn);
/// Returns the number of nodes, events and options with this feature.
std::size_t count_feature(const Case& drawn, const std::string& feature);

}  // namespace ddpkit::fuzz
