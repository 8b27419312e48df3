#include "parallel/ddp/reducer.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <numeric>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

#include "parallel/ddp/debug.h"
#include "parallel/model_agreement.h"
#include "parallel/sharding/parameter_shards.h"

namespace ddpkit {
namespace {

/// Sharded buckets that are reduced in place are small. A collective costs a few microseconds, and smaller buckets need
/// less memory for gradients in progress.
constexpr std::size_t kShardedBucketBytes = std::size_t{1} << 20;

template <class Condition>
std::vector<NamedParameter> select(const std::vector<NamedParameter>& all, const Condition& condition) {
  std::vector<NamedParameter> selected;
  std::copy_if(all.begin(), all.end(), std::back_inserter(selected), condition);
  return selected;
}

bool is_frozen(const NamedParameter& parameter) { return !parameter.tensor.requires_grad(); }

bool is_dense(const NamedParameter& parameter) { return !parameter.sparse; }

/// Dense ones come first.
std::vector<NamedParameter> trained(const std::vector<NamedParameter>& all) {
  auto parameters = select(all, std::not_fn(is_frozen));
  std::stable_partition(parameters.begin(), parameters.end(), is_dense);
  return parameters;
}

UnusedPolicy unused_policy(const ReducerOptions& options) {
  if (options.static_graph) return UnusedPolicy::kStaticGraph;
  return options.find_unused_parameters ? UnusedPolicy::kFind : UnusedPolicy::kError;
}

}  // namespace

Reducer::Impl::Impl(std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options)
    : group_(std::move(group)),
      replica_groups_{.shards = group_},
      options_(options),
      parameters_(trained(parameters)),
      dense_(select(parameters_, is_dense)),
      agreement_(parameters_, select(parameters, is_frozen), group_),
      used_(parameters_, group_, unused_policy(options)),
      bucket_of_(parameters_.size()),
      last_readers_(group_.device()),
      seen_(group_.device()),
      stats_(seen_.has_streams()) {
  lay_out();
}

Reducer::Impl::~Impl() {
  try {
    if (storage_) storage_->keep_alive_for(seen_);
  } catch (...) {
    // The device and its memory do not exist any more.
  }
}

void Reducer::Impl::install_hooks() {
  std::vector<at::Tensor> leaves;
  for (const NamedParameter& parameter : parameters_) leaves.push_back(parameter.tensor);
  // The graph may outlive the reducer.
  hooks_.emplace(
      std::move(leaves),
      [weak = weak_from_this()](std::size_t index, const at::Tensor& added) {
        if (const auto self = weak.lock()) self->on_gradient(index, added);
      },
      GradientHooks::Kind::kExclusive);
  tracker_.emplace(weak_from_this(), mutex_, *hooks_, [this] { end_backward(); });
}

void Reducer::Impl::remove_hooks() noexcept {
  const std::lock_guard lock(mutex_);
  hooks_->remove();
}

// ---- forward

void Reducer::Impl::prepare_for_forward(bool expects_backward) {
  if (hooks_->replaced())
    throw InvalidArgument(
        "a newer DistributedDataParallel wraps parameters of this one: use the newer one, or wrap the module again");
  agreement_.check();
  bool in_backward = false;
  {
    const std::lock_guard lock(mutex_);
    if (backward_.phase == Phase::kInCommHook) throw InvalidArgument("a communication hook cannot call forward");
    end_abandoned_backward();
    in_backward = backward_.phase != Phase::kIdle;
    if (!in_backward) follow_shard_output();
    if (!in_backward && synchronize && expects_backward) used_.count_forward();
  }
  if (const auto output = shard_output_.lock(); output && !in_backward) output->follow_parameters();
  const std::lock_guard lock(mutex_);
  hooks_->refresh();
}

void Reducer::Impl::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard lock(mutex_);
  if (stats_.has_timeline()) {
    tracker_->at_outputs(outputs, /*leaves_too=*/false, [this] {
      if (synchronize && backward_.reached_output == Clock::time_point{}) backward_.reached_output = Clock::now();
    });
  }
  if (!synchronize) return;
  if (!used_.find(outputs, *hooks_) && !std::all_of(parameters_.begin(), parameters_.end(), is_frozen)) {
    tracker_->at_outputs(outputs, /*leaves_too=*/true, [this] { enter_at_output(); });
  } else {
    tracker_->at_outputs(outputs, /*leaves_too=*/false, [this] { tracker_->note_output_reached(); });
  }
}

// ---- settings

void Reducer::Impl::require_no_backward(const char* what) {
  end_abandoned_backward();
  if (backward_.phase != Phase::kIdle) throw InvalidArgument(fmt::format("{} cannot be set while backward runs", what));
}

void Reducer::Impl::require_replicas(const char* call) const {
  const std::lock_guard lock(mutex_);
  const char* const obstacle = parameter_shards_          ? "the parameters are sharded"
                               : !shard_output_.expired() ? "a ShardedOptimizer has the state of one rank only here"
                               : comm_hook_               ? "a communication hook may keep state"
                               : join_                    ? "the ranks are within join()"
                                                          : nullptr;
  if (obstacle)
    throw InvalidArgument(fmt::format("{}: training cannot continue without a lost rank: {}", call, obstacle));
}

void Reducer::Impl::register_comm_hook(CommHook hook) {
  const std::lock_guard lock(mutex_);
  require_no_backward("a communication hook");
  run_on_all_ranks(group_, "register_comm_hook", [&] {
    if (hook && (parameter_shards_ || !shard_output_.expired()))
      throw InvalidArgument("gradients are sharded, but a communication hook needs whole gradients");
  });
  const bool same_memory = static_cast<bool>(comm_hook_) == static_cast<bool>(hook);
  comm_hook_ = std::move(hook);
  if (same_memory) return;
  lay_out();
  arrival_order_.clear();
  rebuilds = 0;
}

void Reducer::Impl::plan_shards(ShardOutput& output) {
  const std::lock_guard lock(mutex_);
  require_no_backward("the output for shards");
  run_on_all_ranks(group_, "ShardedOptimizer", [&] {
    if (comm_hook_) throw InvalidArgument("gradients cannot be sharded: the communication hook needs whole gradients");
    for (const NamedParameter& parameter : parameters_) {
      if (parameter.sparse)
        throw InvalidArgument(fmt::format("the gradient of {} is sparse: it cannot be sharded", parameter.name));
    }
  });
  output.plan = make_plan(current_order(), /*sharded=*/true);
  output.layouts = layouts_of(output.plan, shard_group().world_size());
}

void Reducer::Impl::set_shard_output(const std::shared_ptr<ShardOutput>& output) {
  const std::lock_guard lock(mutex_);
  // Shards are in the memory order of the parameters, which is equal on all ranks.
  for (std::size_t i = 0; i < dense_.size(); ++i) {
    if (dense_[i].tensor.strides() == at::IntArrayRef(strides_[i])) continue;
    lay_out();
    break;
  }
  shard_output_ = output;
  hooks_->set_sharded(output);
  if (!storage_->sharded() || plan != output->plan) use_plan(output->plan, /*sharded=*/true);
  output->state = [weak = weak_from_this(), output = shard_output_] {
    const auto self = weak.lock();
    if (!self) return ShardOutput::State::kNoReducer;
    const std::lock_guard lock_of_state(self->mutex_);
    if (self->hooks_->replaced()) return ShardOutput::State::kNoReducer;
    return self->shard_output_.lock() == output.lock() ? ShardOutput::State::kActive : ShardOutput::State::kReplaced;
  };
}

void Reducer::Impl::set_parameter_shards(std::shared_ptr<ParameterShards> shards) {
  const std::lock_guard lock(mutex_);
  parameter_shards_ = std::move(shards);
  use_plan(plan_blocks(), /*sharded=*/false);
  log_plan("buckets of units");
}

void Reducer::Impl::set_reduce_dtype(at::ScalarType dtype) {
  const std::lock_guard lock(mutex_);
  const auto has_dtype = [dtype](const NamedParameter& parameter) { return parameter.tensor.scalar_type() == dtype; };
  if (std::all_of(dense_.begin(), dense_.end(), has_dtype)) return;
  reduce_dtype_ = dtype;
  lay_out();
}

void Reducer::Impl::set_replica_groups(ReplicaGroups groups) {
  const std::lock_guard lock(mutex_);
  replica_groups_ = std::move(groups);
  lay_out();
}

std::shared_ptr<ParameterShards> Reducer::Impl::parameter_shards() const {
  const std::lock_guard lock(mutex_);
  return parameter_shards_;
}

void Reducer::Impl::set_timeline(std::optional<Timeline> timeline, std::uint64_t write_after) {
  const std::lock_guard lock(mutex_);
  stats_.set_timeline(std::move(timeline), write_after);
}

void Reducer::Impl::set_join(JoinContext* context, const Joinable& joinable) {
  const std::lock_guard lock(mutex_);
  join_ = context;
  joinable_ = &joinable;
  if (backward_.phase == Phase::kShadow) backward_.phase = Phase::kReducing;  // The backward has failed.
  if (context) follow_shard_output();
}

DistributedDataParallelStats Reducer::Impl::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_.stats(rebuilds);
}

// ---- buckets

/// Allocates memory and buckets for the current hook. Collective.
void Reducer::Impl::lay_out() {
  strides_ = agree_on_strides(dense_, group_);
  auto storage = comm_hook_ || reduce_dtype_ || replica_groups_.replicas
                     ? nullptr
                     : make_in_place_storage(dense_, strides_, group_, options_.gradient_as_bucket_view, options_.arena,
                                             options_.arena_bytes);
  storage_ = storage ? std::move(storage)
                     : make_flat_storage(dense_, strides_, group_, shard_group(), options_.gradient_as_bucket_view,
                                         reduce_dtype_);
  std::vector<std::size_t> order(dense_.size());
  std::iota(order.begin(), order.end(), 0);
  use_plan(make_plan(order, /*sharded=*/false), /*sharded=*/false);
  log_plan("buckets");
}

/// Reduces whole gradients again if the output of shards was destroyed. Collective.
void Reducer::Impl::follow_shard_output() {
  if (storage_->sharded() && shard_output_.expired())
    use_plan(make_plan(current_order(), /*sharded=*/false), /*sharded=*/false);
}

std::vector<std::size_t> Reducer::Impl::current_order() const {
  std::vector<std::size_t> order;
  for (const auto& members : plan) order.insert(order.end(), members.begin(), members.end());
  std::reverse(order.begin(), order.end());
  return order;
}

/// `order`: all dense parameters, in reverse order of their gradients.
BucketPlan Reducer::Impl::make_plan(const std::vector<std::size_t>& order, bool sharded) const {
  if (parameter_shards_) return plan_blocks();
  std::vector<ParameterInfo> infos;
  for (const std::size_t index : order) {
    const at::Tensor& tensor = dense_[index].tensor;
    infos.push_back(
        {.numel = static_cast<std::size_t>(tensor.numel()), .dtype = tensor.scalar_type(), .device = tensor.device()});
  }
  const bool small = sharded && storage_->in_place();
  const auto cap = [small](std::size_t bytes) { return small ? std::min(bytes, kShardedBucketBytes) : bytes; };
  BucketPlan buckets = plan_buckets(infos, cap(options_.first_bucket_bytes), cap(options_.bucket_bytes));
  for (auto& members : buckets) {
    for (std::size_t& index : members) index = order[index];
  }
  return buckets;
}

/// Buckets are in the order of their last gradients.
BucketPlan Reducer::Impl::plan_blocks() const {
  std::map<std::pair<std::size_t, std::size_t>, std::vector<std::size_t>> members_of;  // [unit, block]
  for (std::size_t i = 0; i < dense_.size(); ++i)
    members_of[parameter_shards_->block_of(dense_[i].tensor)].push_back(i);
  BucketPlan buckets;
  for (auto& [block, members] : members_of) buckets.push_back(std::move(members));
  std::stable_sort(buckets.begin(), buckets.end(), [](const auto& a, const auto& b) { return a.front() > b.front(); });
  return buckets;
}

std::vector<FlatLayout> Reducer::Impl::layouts_of(const BucketPlan& buckets, int ranks) const {
  std::vector<FlatLayout> layouts;
  for (const auto& members : buckets) {
    std::vector<std::int64_t> numels;
    for (const std::size_t index : members) numels.push_back(dense_[index].tensor.numel());
    layouts.push_back(make_flat_layout(std::move(numels), dense_[members[0]].tensor.element_size(), ranks));
  }
  return layouts;
}

void Reducer::Impl::use_plan(BucketPlan buckets, bool sharded) {
  plan = std::move(buckets);
  bucket_bytes_.assign(plan.size(), 0);
  for (std::size_t b = 0; b < plan.size(); ++b) {
    for (const std::size_t index : plan[b]) {
      bucket_bytes_[b] += dense_[index].tensor.nbytes();
      bucket_of_[index] = b;
    }
  }
  storage_->keep_alive_for(seen_);  // Copies out of the old buckets may still be queued.
  seen_.clear();
  storage_->lay_out(plan, layouts_of(plan, sharded ? shard_group().world_size() : 1), sharded);
  seen_.add_current();
  last_readers_.add_current();  // The current stream has zeroed the buffers.
}

/// For DDPKIT_DEBUG. The plan is equal on all ranks.
void Reducer::Impl::log_plan(const char* what) const {
  if (debug_level() < DebugLevel::kInfo || group_.rank() != 0) return;
  debug_line(group_, fmt::format("{}: {} for {} dense parameters, {} sparse ones beside", what, plan.size(),
                                 dense_.size(), parameters_.size() - dense_.size()));
  for (std::size_t b = 0; b < plan.size(); ++b) {
    std::vector<std::string> names;
    for (const std::size_t index : plan[b]) names.push_back(dense_[index].name);
    debug_line(group_, fmt::format("  bucket {}: {} bytes, {} parameters: {}", b, bucket_bytes_[b], names.size(),
                                   fmt::join(names, ", ")));
  }
}

void Reducer::Impl::note_arrival(std::size_t index) {
  if (rebuilds != 0 || storage_->sharded() || index >= dense_.size()) return;
  if (used_.arrivals(index) > 1) std::erase(arrival_order_, index);  // Its bucket waits for the last gradient.
  if (arrival_order_.size() < dense_.size()) arrival_order_.push_back(index);
}

/// Runs once, after the first backward: orders the buckets by the arrival of gradients, which may differ from the
/// reverse registration order. As in Python, not if each backward may use other parameters. The buckets of shards stay:
/// optimizer state has the same layout.
void Reducer::Impl::rebuild() {
  if (rebuilds != 0 || storage_->sharded() || parameter_shards_ || used_.policy() == UnusedPolicy::kFind) return;
  ++rebuilds;
  auto order = agree_on_order(std::exchange(arrival_order_, {}), dense_.size(), group_);
  std::reverse(order.begin(), order.end());
  use_plan(make_plan(order, /*sharded=*/false), /*sharded=*/false);
  log_plan("buckets rebuilt in the order in which gradients came");
}

// ---- the public class

Reducer::Reducer(std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options)
    : impl_(std::make_shared<Impl>(std::move(parameters), std::move(group), options)) {
  impl_->install_hooks();
}

Reducer::~Reducer() { impl_->remove_hooks(); }

Reducer::NoSync::NoSync(std::shared_ptr<Impl> impl)
    : impl_(std::move(impl)), before_(impl_->synchronize.exchange(false)) {}

Reducer::NoSync::~NoSync() {
  if (impl_) impl_->synchronize = before_;
}

void Reducer::prepare_for_forward(bool expects_backward) { impl_->prepare_for_forward(expects_backward); }
void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) { impl_->prepare_for_backward(outputs); }
Reducer::NoSync Reducer::no_sync() { return NoSync(impl_); }
void Reducer::register_comm_hook(CommHook hook) { impl_->register_comm_hook(std::move(hook)); }
void Reducer::set_timeline(std::optional<Timeline> timeline) { impl_->set_timeline(std::move(timeline)); }
DistributedDataParallelStats Reducer::stats() const { return impl_->stats(); }
const BucketPlan& Reducer::buckets() const noexcept { return impl_->plan; }
std::optional<ArenaStats> Reducer::arena() const { return impl_->arena(); }

const std::vector<NamedParameter>& parameters_of(const Reducer& reducer) {
  return Reducer::Impl::of(reducer).parameters();
}

std::shared_ptr<ParameterShards> parameter_shards_of(const Reducer& reducer) {
  return Reducer::Impl::of(reducer).parameter_shards();
}

const ProcessGroup& shard_group_of(const Reducer& reducer) { return Reducer::Impl::of(reducer).shard_group(); }

void ShardOutput::make_plan(const Reducer& reducer) { Reducer::Impl::of(reducer).plan_shards(*this); }
void ShardOutput::attach(const std::shared_ptr<ShardOutput>& output, const Reducer& reducer) {
  Reducer::Impl::of(reducer).set_shard_output(output);
}

}  // namespace ddpkit
