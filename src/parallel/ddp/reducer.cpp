#include "parallel/ddp/reducer.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

#include "parallel/ddp/bucket_plans.h"
#include "parallel/ddp/debug.h"
#include "parallel/join.h"
#include "parallel/model_agreement.h"
#include "parallel/sharding/gathered_use.h"
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

bool are_sharded(const std::vector<NamedParameter>& parameters) {
  return !parameters.empty() && GatheredParameter::is_gathered(parameters[0].tensor);
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

/// Ends a backward that has begun and will not finish. A call from within a backward, such as the forward pass of a
/// checkpoint, belongs to a backward in progress.
void Reducer::Impl::end_abandoned_backward() {
  if (backward_.phase == Phase::kIdle || backward_.phase == Phase::kInCommHook) return;
  const bool has_died = backward_.phase != Phase::kShadow && !tracker_->will_end();
  if (!has_died && BackwardTracker::inside_backward()) return;
  // Other ranks may still write to the buffers of a started collective.
  for (BucketState& bucket : backward_.buckets) {
    if (bucket.work.valid()) bucket.work.wait();
  }
  reset();
}

void Reducer::Impl::require_no_backward(const char* what) {
  end_abandoned_backward();
  if (backward_.phase != Phase::kIdle) throw InvalidArgument(fmt::format("{} cannot be set while backward runs", what));
}

void Reducer::Impl::require_replicas(const char* call) const {
  const std::lock_guard lock(mutex_);
  const auto output = shard_output_.lock();
  const char* const obstacle = parameter_shards_ ? "the parameters are sharded"
                               : output && !output->survives_loss()
                                   ? "a ShardedOptimizer continues only with the backend shm, without shared_weights "
                                     "and update_in_backward, and if no two parameters share memory"
                               : comm_hook_ ? "a communication hook may keep state"
                               : join_      ? "the ranks are within join()"
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
  output.plan = make_plan(order_of(plan), /*sharded=*/true);
  output.layouts = layouts_of(dense_, output.plan, shard_group().world_size());
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
  parameter_shards_->set_reductions(reductions());
  use_plan(make_plan({}, /*sharded=*/false), /*sharded=*/false);
  log_plan(group_, "buckets of units", plan, parameters_);
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

// ---- join

void Reducer::Impl::notify(int event) {
  if (join_ && backward_.phase != Phase::kShadow) join_->notify(*joinable_, event);
}

/// Returns the factor that turns an average over all ranks into an average over ranks with inputs.
double Reducer::Impl::join_factor() const {
  if (!join_ || join_->options().divide_by_initial_world_size) return 1;
  return static_cast<double>(group_.world_size()) / join_->active();
}

void Reducer::Impl::divide_by_active_ranks() {
  const double factor = join_factor();
  if (factor == 1 || storage_->sharded()) return;
  const at::NoGradGuard no_grad;
  std::unordered_set<const void*> divided;  // Two parameters may share one gradient.
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& gradient = parameters_[i].tensor.mutable_grad();
    if (!gradient.defined() || !used_.used_anywhere(i)) continue;
    if (divided.insert(gradient.unsafeGetTensorImpl()).second) gradient.mul_(factor);
  }
}

void Reducer::Impl::shadow_bucket() {
  const std::lock_guard lock(mutex_);
  begin_shadow();
  start_bucket(backward_.started++);
}

void Reducer::Impl::shadow_end_of_backward() {
  const std::lock_guard lock(mutex_);
  begin_shadow();
  finish_backward();
}

/// A backward without gradients: this rank has run out of inputs.
void Reducer::Impl::begin_shadow() {
  if (backward_.phase == Phase::kShadow) return;
  end_abandoned_backward();
  begin(Phase::kShadow);
  for (NamedParameter& parameter : parameters_) parameter.tensor.mutable_grad().reset();
  used_.begin_shadow();
  backward_.first_gradient = backward_.last_gradient = Clock::now();
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
                                         /*on_demand=*/are_sharded(dense_), reduce_dtype_);
  std::vector<std::size_t> order(dense_.size());
  std::iota(order.begin(), order.end(), 0);
  use_plan(make_plan(order, /*sharded=*/false), /*sharded=*/false);
  log_plan(group_, "buckets", plan, parameters_);
}

/// Reduces whole gradients again if the output of shards was destroyed. Collective.
void Reducer::Impl::follow_shard_output() {
  if (storage_->sharded() && shard_output_.expired())
    use_plan(make_plan(order_of(plan), /*sharded=*/false), /*sharded=*/false);
}

/// `order`: all dense parameters, in reverse order of their gradients.
BucketPlan Reducer::Impl::make_plan(const std::vector<std::size_t>& order, bool sharded) const {
  if (parameter_shards_) return plan_blocks(dense_, *parameter_shards_);
  const bool small = sharded && storage_->in_place();
  const auto cap = [small](std::size_t bytes) { return small ? std::min(bytes, kShardedBucketBytes) : bytes; };
  return plan_in_order(dense_, order, cap(options_.first_bucket_bytes), cap(options_.bucket_bytes));
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
  storage_->lay_out(plan, layouts_of(dense_, plan, sharded ? shard_group().world_size() : 1), sharded);
  seen_.add_current();
  last_readers_.add_current();  // The current stream has zeroed the buffers.
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
  log_plan(group_, "buckets rebuilt in the order in which gradients came", plan, parameters_);
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

}  // namespace ddpkit
