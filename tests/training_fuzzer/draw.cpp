// The grammar: the random choices and their probabilities.
#include <algorithm>

#include "case.h"
#include "dice.h"

namespace ddpkit::fuzz {
namespace {

class Drawer {
 public:
  Drawer(std::uint64_t seed, std::uint64_t number) : dice_(seed, number) {}

  Case draw() {
    case_.data = static_cast<std::uint64_t>(dice_.below(1'000'000));
    draw_ranks();
    const int nodes = 1 + dice_.below(5);
    for (int i = 0; i < nodes; ++i) draw_node(i);
    // A model needs at least one trainable layer.
    if (std::none_of(case_.nodes.begin(), case_.nodes.end(), [](const Node& node) {
          return node.kind != "mask" && node.kind != "empty" && !node.frozen && !node.ignored && node.when == "always";
        }))
      case_.nodes.push_back({});
    draw_wrapper();
    draw_optimizer();
    const int steps = 2 + dice_.below(4);
    for (int i = 0; i < steps; ++i) draw_events();
    return case_;
  }

 private:
  bool is_half() const { return case_.dtype == "f16" || case_.dtype == "bf16"; }
  bool is_data_parallel() const { return case_.wrapper.kind == "data_parallel"; }
  bool is_fsdp() const { return is_fully_sharded(case_); }
  /// A fully sharded model refuses some features, which ends the case: few of its cases have each of them.
  bool draws_refused() { return !is_fsdp() || dice_.percent(3); }
  bool differs_by_rank() const {
    return any_node(&Node::when, std::string("by_rank")) || any_node(&Node::when, std::string("rank_0"));
  }
  bool has(const char* kind) const {
    return std::any_of(case_.nodes.begin(), case_.nodes.end(), [&](const Node& node) { return node.kind == kind; });
  }
  template <class Member, class Value>
  bool any_node(Member member, const Value& value) const {
    return std::any_of(case_.nodes.begin(), case_.nodes.end(), [&](const Node& node) { return node.*member == value; });
  }

  void draw_ranks() {
    case_.world = dice_.percent(70) ? 2 : dice_.one_of({3, 3, 4, 4, 1});
    if (dice_.percent(12))
      case_.wrapper.kind = "data_parallel";
    else if (dice_.percent(25))
      case_.wrapper.kind = "fsdp";
    if (!is_data_parallel() && dice_.percent(12)) case_.backend = dice_.word({"gloo", "hierarchical"});
    const int type = dice_.below(100);
    case_.dtype = type < 60 ? "f64" : type < 80 ? "f32" : type < 88 ? "bf16" : "f16";
    if (case_.dtype == "f16" && dice_.percent(50)) case_.magnitude = 60000;
    if (case_.dtype == "f32" && dice_.percent(20)) case_.autocast = dice_.word({"bf16", "f16"});
    case_.width = 2 + dice_.below(3);
    case_.rows = 2 + dice_.below(2);
    case_.other_starts = !is_data_parallel() && dice_.percent(20);
    case_.twice = dice_.percent(5);
  }

  void draw_node(int index) {
    Node node;
    if (is_half() || !case_.autocast.empty()) {
      node.kind = dice_.word({"linear", "linear", "matmul", "scale", "bias", "mask"});
    } else {
      node.kind = dice_.word({"linear", "linear", "linear", "matmul", "scale", "empty", "bias", "conv", "embedding",
                              "layer_norm", "batch_norm", "batch_norm", "sync_batch_norm", "lstm", "complex", "mask"});
    }
    if (is_data_parallel() && node.kind == "sync_batch_norm") node.kind = "batch_norm";
    if (is_fsdp() && node.kind == "complex") node.kind = "matmul";  // ShardedOptimizer has no complex types.
    if (dice_.percent(20)) node.layout = dice_.word({"transposed", "channels_last", "sliced", "flat"});
    if ((node.layout == "sliced" || node.layout == "flat") && !draws_refused()) node.layout = "transposed";
    if (!node.layout.empty() && !is_data_parallel() && dice_.percent(40) && draws_refused())
      node.layout_rank = dice_.below(case_.world);
    if (node.layout == "flat") node.layout_rank = -1;
    if (node.kind == "linear" && index > 0 && dice_.percent(25)) {
      for (int i = 0; i < index; ++i)
        if (case_.nodes[static_cast<std::size_t>(i)].kind == "linear") node.tie = i;
      if (node.tie >= 0) node.tie_by = dice_.word({"name", "handle"});
    }
    if (dice_.percent(12)) node.uses = 2;
    if (!is_data_parallel() && dice_.percent(6)) node.when = dice_.word({"never", "even_steps", "rank_0", "by_rank"});
    if (node.kind == "embedding") node.sparse = dice_.percent(40) && draws_refused();
    if (!is_data_parallel() && dice_.percent(10) && node.kind != "batch_norm" && node.kind != "sync_batch_norm" &&
        case_.autocast.empty())  // The tests' checkpoint does not restore autocast.
      node.checkpoint = true;
    // A second run would change the running statistics again.
    if (!node.checkpoint && node.kind != "batch_norm" && node.kind != "sync_batch_norm")
      node.recomputed = dice_.percent(10);
    node.frozen = dice_.percent(5);
    // The reference gives sync_batch_norm's gradients to one rank's parameters.
    node.ignored =
        !is_data_parallel() && !is_fsdp() && node.tie < 0 && node.kind != "sync_batch_norm" && dice_.percent(4);
    node.detach = dice_.percent(2);
    if (case_.dtype == "f64" && dice_.percent(6) && (node.kind == "linear" || node.kind == "matmul"))
      node.dtype = dice_.word({"f32", "bf16"});
    if (node.tie >= 0) node.dtype = case_.nodes[static_cast<std::size_t>(node.tie)].dtype;
    case_.nodes.push_back(node);
  }

  void draw_wrapper() {
    Wrapper& wrapper = case_.wrapper;
    wrapper.bucket_cap_mb = dice_.one_of({25.0, 25.0, 0.000001, 0.0001});
    wrapper.arena = dice_.percent(75);
    wrapper.broadcast_buffers = dice_.percent(80);
    if (is_data_parallel()) return;
    wrapper.view = dice_.percent(25);
    // If a rank's input to the layer requires no gradient, the rank would skip the layer's collectives in backward.
    if (has("sync_batch_norm"))
      for (Node& node : case_.nodes)
        if (node.when != "never") node.when = "always";
    const bool unused = !std::all_of(case_.nodes.begin(), case_.nodes.end(),
                                     [](const Node& node) { return node.when == "always" && !node.detach; });
    wrapper.find_unused = dice_.percent(unused ? 85 : 20);
    if (is_fsdp()) return draw_sharding();
    wrapper.static_graph = !unused && !wrapper.find_unused && dice_.percent(20);
    if (dice_.percent(15) && case_.magnitude == 1)
      wrapper.hook = dice_.word({"all_reduce", "fp16", "bf16", "power_sgd", "own"});
    if (wrapper.hook == "own" && dice_.percent(3)) wrapper.hook = "stats";
    wrapper.output = dice_.percent(80) ? "tensor" : dice_.word({"tuple", "map", "opaque"});
  }

  void draw_sharding() {
    Wrapper& wrapper = case_.wrapper;
    wrapper = {
        .kind = wrapper.kind, .find_unused = wrapper.find_unused, .broadcast_buffers = wrapper.broadcast_buffers};
    wrapper.output = dice_.percent(80) ? "tensor" : dice_.word({"tuple", "map", "opaque"});
    // Ranks must use the units in the same order.
    if (!differs_by_rank()) wrapper.units = dice_.word({"", "each", "each", "each", "even"});
    wrapper.min_unit_mb = dice_.one_of({0.0, 0.0, 0.0, 0.0001, 1.0});
    wrapper.reshard = dice_.percent(70);
    wrapper.scope = dice_.word({"whole", "gathering"});
  }

  void draw_optimizer() {
    OptimizerChoice& choice = case_.optimizer;
    const bool sparse = any_node(&Node::sparse, true);
    const bool cancels = case_.dtype == "f32" && (has("batch_norm") || has("sync_batch_norm"));
    const bool coarse = cancels || is_half() || !case_.autocast.empty() || any_node(&Node::dtype, "bf16") ||
                        case_.wrapper.hook == "fp16" || case_.wrapper.hook == "bf16";
    const int engine = dice_.below(100);
    choice.engine = sparse || engine < 30 ? "torch" : engine < 60 || is_data_parallel() ? "fused" : "sharded";
    if (choice.engine == "sharded" && case_.wrapper.hook != "none") choice.engine = "fused";
    if (!sparse && !draws_refused()) choice.engine = "sharded";  // step() refuses the other ones.
    if (has("complex") && choice.engine != "torch") choice.engine = "torch";
    // Adam divides by the size of the gradients, so rounding errors become as large as gradients.
    choice.kind = sparse || coarse ? "sgd" : dice_.word({"sgd", "adam", "adamw"});
    choice.groups = dice_.percent(75) ? 1 : 2 + dice_.below(2);
    if (choice.kind == "sgd" && !sparse) {
      // Near the limit of the type, LibTorch's intermediate values overflow; ddpkit's are in float32 and do not.
      choice.momentum = case_.magnitude == 1 && dice_.percent(50) ? 0.9 : 0;
      choice.nesterov = choice.momentum > 0 && dice_.percent(30);
    } else if (!sparse) {
      choice.amsgrad = !has("complex") && dice_.percent(20);
    }
    if (!sparse) choice.weight_decay = dice_.percent(25) ? 0.1 : 0;
    choice.maximize = choice.engine != "torch" && dice_.percent(10);
    if (choice.engine == "sharded") {
      choice.in_backward = dice_.percent(20) && draws_refused();
      choice.own_weights = !draws_refused() || dice_.percent(30);
    }
    choice.scaler =
        !has("complex") && !is_half() && !sparse && !choice.in_backward && case_.dtype != "bf16" && dice_.percent(10);
    choice.schedule = dice_.percent(20);
  }

  void add(Event event) { case_.events.push_back(std::move(event)); }
  std::string zero() {
    return case_.optimizer.engine == "sharded" ? dice_.word({"", "", "base"}) : dice_.word({"", "", "base", "module"});
  }
  int any_index() { return dice_.below(static_cast<int>(case_.nodes.size())); }
  /// One rank, or all.
  int some_rank() { return dice_.percent(50) ? -1 : dice_.below(case_.world); }

  void draw_step() {
    add({.kind = "zero", .how = zero()});
    add({.kind = "forward"});
    add({.kind = "backward"});
    add({.kind = "step"});
  }

  void draw_clipped_step(bool poisoned) {
    add({.kind = "zero", .how = zero()});
    Event forward{.kind = "forward"};
    if (poisoned && case_.wrapper.hook != "power_sgd") {  // PowerSGD keeps the part that it has not sent.
      forward.how = "poison";
      forward.rank = some_rank();
    }
    add(forward);
    add({.kind = "backward"});
    // The order of the norm; 0 means infinity.
    add({.kind = "clip", .node = dice_.one_of({2, 2, 2, 1, 0, 3}), .value = dice_.one_of({0.01, 1.0, 1e6})});
    add({.kind = "step", .how = "if_finite"});
  }

  /// Draws a step, or events around steps.
  void draw_events() {
    const bool clips = !case_.optimizer.in_backward && !any_node(&Node::ignored, true);
    // Near the limit of a type, the order of a sum decides whether it overflows.
    if (case_.magnitude != 1 && dice_.percent(80)) return draw_step();
    switch (dice_.below(32)) {
      case 0:
        if (clips) draw_clipped_step(false);
        return draw_step();
      case 1:
        if (clips) draw_clipped_step(true);
        return draw_step();
      case 2:  // Accumulates gradients.
        if (is_data_parallel()) return draw_step();
        add({.kind = "zero", .how = zero()});
        for (int i = 1 + dice_.below(2); i > 0; --i) {
          const std::string how = dice_.word({"no_sync", "no_sync", "nested_no_sync"});
          add({.kind = "forward", .how = how});
          add({.kind = "backward", .how = how});
        }
        add({.kind = "forward"});
        add({.kind = "backward"});
        return add({.kind = "step"});
      case 3: {  // Two forwards, one backward.
        add({.kind = "zero", .how = zero()});
        add({.kind = "forward", .slots = {0}});
        add({.kind = "forward", .slots = {1}, .how = dice_.word({"", "", "eval"})});
        add({.kind = "backward", .slots = dice_.percent(50) ? std::vector<int>{0, 1} : std::vector<int>{0}});
        return add({.kind = "step"});
      }
      case 4:  // Two backwards on one forward, possibly with a step between.
        if (case_.optimizer.in_backward) return draw_step();
        add({.kind = "zero", .how = zero()});
        add({.kind = "forward"});
        add({.kind = "backward", .how = "retain"});
        // A checkpoint would recompute with the new weights, or throw.
        if (dice_.percent(60) && !any_node(&Node::checkpoint, true) && !any_node(&Node::recomputed, true))
          add({.kind = "step"});
        if (dice_.percent(50)) add({.kind = "zero", .how = zero()});
        add({.kind = "backward"});
        return add({.kind = "step"});
      case 5:
        add({.kind = "freeze", .node = any_index()});
        return draw_step();
      case 6: {
        const int node = any_index();
        add({.kind = "unfreeze", .node = node});
        return draw_step();
      }
      case 7:
        add({.kind = "set_layout",
             .how = dice_.word({"transposed", "channels_last", "sliced", "contiguous"}),
             .node = any_index(),
             .rank = is_data_parallel() ? -1 : some_rank()});
        // The parameter is no longer a view of `flat`, which a later event writes. On all ranks, or their weights would
        // differ.
        if (any_node(&Node::layout, "flat")) case_.events.back().rank = -1;
        return draw_step();
      case 8:
      case 9:
        add({.kind = "write",
             .how = any_node(&Node::layout, "flat") && dice_.percent(70) ? "flat" : dice_.word({"in_place", "pointer"}),
             .node = any_index()});
        return draw_step();
      case 10:
        if (!is_data_parallel())
          add({.kind = "wrap_again", .how = dice_.word({"old_first", "new_first", "under_optimizer"})});
        return draw_step();
      case 11:
        add({.kind = "optimizer_again", .how = dice_.word({"old_first", "new_first"})});
        return draw_step();
      case 12:
      case 13:
      case 14:
        add({.kind = "save_load",
             // A checkpoint holds one rank's weights.
             .how = is_data_parallel()               ? "same"
                    : any_node(&Node::ignored, true) ? dice_.word({"same", "new", "schedule_after"})
                                                     : dice_.word({"same", "new", "schedule_after", "checkpoint"})});
        return draw_step();
      case 15:
        if (!case_.optimizer.schedule && case_.optimizer.groups == 1 && draws_refused()) add({.kind = "add_group"});
        return draw_step();
      case 16:
      case 17: {
        if (is_data_parallel() || case_.optimizer.scaler || !draws_refused()) return draw_step();
        Event join{.kind = "join"};
        if (dice_.percent(30)) join.how = "active";
        for (int rank = 0; rank < case_.world; ++rank) join.counts.push_back(dice_.below(4));
        join.counts[0] = std::max(join.counts[0], 1);
        add(join);
        return draw_step();
      }
      case 18:
        if (is_data_parallel() || case_.optimizer.in_backward) return draw_step();
        // Ranks with different graphs would call collectives that do not match. Gloo then terminates the process.
        if (case_.backend != "shm" && differs_by_rank()) return draw_step();
        add({.kind = "throw",
             .how = case_.wrapper.hook == "none"
                        ? dice_.word({"forward", "backward"})
                        : dice_.word({"forward", "backward", "hook", "hook_last", "hook_finish"}),
             .node = any_index(),
             .rank = dice_.percent(70) ? -1 : dice_.below(case_.world)});
        return draw_step();
      case 19:
        if (!is_data_parallel() && !is_fsdp() && case_.optimizer.engine != "sharded")
          add({.kind = "hook", .how = dice_.word({"all_reduce", "own", "none_again"})});
        return draw_step();
      case 20:  // As in programs that scale gradients themselves.
        if (case_.optimizer.engine == "sharded") return draw_step();
        add({.kind = "zero", .how = zero()});
        add({.kind = "forward"});
        add({.kind = "backward"});
        add({.kind = "edit_gradients", .how = dice_.word({"in_place", "replace"})});
        return add({.kind = "step"});
      case 21:
        if (case_.dtype == "f64" && !is_data_parallel() && !has("complex") && dice_.percent(20)) add({.kind = "cast"});
        return draw_step();
      case 22:  // The program keeps these gradients. With `view` they are parts of buckets, as in Python.
        draw_step();
        if (case_.optimizer.engine == "sharded" || case_.wrapper.view || case_.optimizer.scaler) return;
        add({.kind = "zero", .how = "hold"});
        for (const char* kind : {"forward", "backward", "step"}) add({.kind = kind});
        return;
      default:
        return draw_step();
    }
  }

  Dice dice_;
  Case case_;
};

}  // namespace

Case draw(std::uint64_t seed, std::uint64_t number) { return Drawer(seed, number).draw(); }

}  // namespace ddpkit::fuzz
