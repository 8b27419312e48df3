// The errors that the documentation permits, as an Error on all ranks. All other cases must succeed.
#include <algorithm>
#include <set>

#include "judge.h"

namespace ddpkit::fuzz {
namespace {

struct Clause {
  const char* feature;   ///< A prefix of one of the case's features.
  const char* feature2;  ///< A second feature; empty: none.
  const char* phrase;    ///< Text in the message.
};

constexpr Clause kClauses[] = {
    // docs/ddp.md: unused parameters need find_unused_parameters or static_graph.
    {"node.when", "", "gave no gradient to"},
    {"node.detach", "", "gave no gradient to"},
    {"event.kind=freeze", "", "gave no gradient to"},
    // docs/ddp.md: a rank that uses no parameter needs an output whose tensors ddpkit can find.
    {"node.when", "wrapper.output=opaque", "cannot find the tensors in the output"},
    {"node.detach", "wrapper.output=opaque", "cannot find the tensors in the output"},
    {"event.kind=freeze", "wrapper.output=opaque", "cannot find the tensors in the output"},
    // The same, on a rank whose next collective precedes its next backward.
    {"node.when=by_rank", "wrapper.output=opaque", "do not match"},
    {"node.when=rank_0", "wrapper.output=opaque", "do not match"},
    {"node.when=by_rank", "wrapper.output=opaque", "is at the end of backward"},
    {"node.when=rank_0", "wrapper.output=opaque", "is at the end of backward"},
    // The same: checkpointed parameters do not appear in the graph of the forward pass.
    {"node.checkpoint", "wrapper.find_unused", "got a gradient though no output of forward comes from it"},
    // docs/optimizers.md: unsupported uses of a sharded optimizer.
    {"optimizer.engine=sharded", "layout=sliced", "is not dense in memory"},
    {"optimizer.engine=sharded", "event.how=sliced", "is not dense in memory"},
    {"optimizer.engine=sharded", "layout=sliced", "belong to no parameter"},
    {"optimizer.engine=sharded", "layout=flat", "belong to no parameter"},
    {"optimizer.engine=sharded", "event.kind=add_group", "parameter groups have changed"},
    {"optimizer.engine=sharded", "node.sparse", "is sparse"},
    {"optimizer.engine=sharded", "event.kind=freeze", "is in no parameter group"},
    {"optimizer.engine=sharded", "how=sliced", "its memory must be its own"},
    // docs/fsdp.md: limits of FullyShardedDataParallel.
    {"wrapper.kind=fsdp", "layout=flat", "shares its memory with another tensor"},
    {"wrapper.kind=fsdp", "layout=sliced", "is not dense in memory"},
    {"wrapper.kind=fsdp", "node.sparse", "is sparse"},
    {"wrapper.kind=fsdp", "optimizer.in_backward", "update_in_backward"},
    {"wrapper.kind=fsdp", "optimizer.engine=sharded", "shared_weights does not support"},
    {"wrapper.kind=fsdp", "event.kind=join", "join() does not support FullyShardedDataParallel"},
    // JoinState passes the state of averaged parameters only.
    {"node.ignored", "event.kind=join", "does not average a parameter"},
    {"event.kind=add_group", "event.kind=join", "does not average a parameter"},
    {"event.kind=freeze", "event.kind=wrap_again", "does not average a parameter"},
    {"optimizer.in_backward", "", "update_in_backward"},
    // torch::optim::SGD writes weights without notifying autograd; other optimizers notify it.
    {"optimizer.engine", "event.how=retain", "modified by an inplace operation"},
    // ProcessGroup::abort() does not reach the other ranks over gloo.
    {"backend=", "", "gloo/transport/"},
    // Layouts that differ between ranks may work or raise an error.
    {"node.layout_rank", "", "differs between rank"},
    {"event.kind=set_layout", "event.rank", "differs between rank"},
    {"event.kind=cast", "", ""},
    {"event.kind=freeze", "", "requires_grad"},
    {"event.kind=unfreeze", "", "requires_grad"},
    // docs/ddp.md: checkpoints that share a parameter need static_graph, which needs as many gradients in each
    // backward.
    {"node.checkpoint", "", "ready twice"},
    {"node.checkpoint", "wrapper.static_graph", "gave no gradient to"},
    // Ranks with different graphs catch an exception after different numbers of reduced buckets.
    {"event.kind=throw", "node.when=by_rank", "do not match"},
    {"event.kind=throw", "node.when=rank_0", "do not match"},
};

/// Returns whether the model is wrapped when no averaged parameter requires a gradient.
bool wraps_untrained_model(const Case& drawn) {
  const auto is_averaged = [&](std::size_t i) {
    return i < drawn.nodes.size() && drawn.nodes[i].kind != "mask" && !drawn.nodes[i].ignored;
  };
  std::set<std::size_t> trained;
  for (std::size_t i = 0; i < drawn.nodes.size(); ++i)
    if (is_averaged(i) && !drawn.nodes[i].frozen) trained.insert(i);
  bool found = trained.empty();
  for (const Event& event : drawn.events) {
    const auto node = static_cast<std::size_t>(event.node);
    if (event.kind == "freeze") trained.erase(node);
    if (event.kind == "unfreeze" && is_averaged(node)) trained.insert(node);
    found = found || (event.kind == "wrap_again" && trained.empty());
  }
  return found;
}

}  // namespace

bool may_refuse(const Case& drawn, const std::string& message) {
  // docs/fsdp.md: only a ShardedOptimizer can update the shards.
  if (is_fully_sharded(drawn) && drawn.optimizer.engine != "sharded" &&
      (message.find("is sharded by FullyShardedDataParallel") != std::string::npos ||
       message.find("used it outside the forward pass and backward") != std::string::npos))
    return true;
  if (message.find("needs a module with at least one parameter") != std::string::npos)
    return wraps_untrained_model(drawn);
  const auto all = features(drawn);
  const auto holds = [&](const std::string& feature) {
    return feature.empty() || std::any_of(all.begin(), all.end(), [&](const std::string& one) {
             return one.find(feature) != std::string::npos;
           });
  };
  return std::any_of(std::begin(kClauses), std::end(kClauses), [&](const Clause& clause) {
    return holds(clause.feature) && holds(clause.feature2) && message.find(clause.phrase) != std::string::npos;
  });
}

}  // namespace ddpkit::fuzz
