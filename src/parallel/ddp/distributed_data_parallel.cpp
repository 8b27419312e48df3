#include <ddpkit/parallel/distributed_data_parallel.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <unordered_set>

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

#include "comm/joining.h"
#include "comm/timeline.h"
#include "comm/trace/event_ring.h"
#include "parallel/ddp/debug.h"
#include "parallel/ddp/reducer.h"
#include "parallel/join.h"
#include "parallel/model_agreement.h"
#include "parallel/option_bytes.h"
#include "parallel/sharding/gathered_use.h"
#include "tensor/tensor_memory.h"

namespace ddpkit {
namespace {

using Clock = Backward::Clock;

/// Returns the options that must be equal on all ranks.
std::string text_of(const DistributedDataParallelOptions& options) {
  return fmt::format(
      "options bucket_cap_mb {}, first_bucket_cap_mb {}, broadcast_buffers {}, find_unused_parameters {}, "
      "static_graph {}, parameters_to_ignore [{}], arena {}",
      options.bucket_cap_mb, options.first_bucket_cap_mb, options.broadcast_buffers, options.find_unused_parameters,
      options.static_graph, fmt::join(options.parameters_to_ignore, ", "), options.arena);
}

void check_has_values(const std::string& name, const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_meta())
    throw InvalidArgument(fmt::format(
        "DistributedDataParallel broadcasts dense tensors with values, but {} is {} on {}: replace the tensor, or put "
        "its name into parameters_to_ignore",
        name, c10::str(tensor.layout()), tensor.device().str()));
}

/// Returns the tensors that are not in `ignored`. Removes the names found from `ignored`.
NamedTensors without(const torch::OrderedDict<std::string, at::Tensor>& all, const std::vector<std::string>& ignored,
                     std::unordered_set<std::string>& unknown) {
  NamedTensors names;
  for (const auto& item : all) {
    if (std::find(ignored.begin(), ignored.end(), item.key()) == ignored.end()) {
      check_has_values(item.key(), item.value());
      names.emplace_back(item.key(), item.value());
    } else {
      unknown.erase(item.key());
    }
  }
  return names;
}

using Write = std::function<void(std::size_t index, const at::Tensor& values)>;

/// Broadcasts rank `source`'s values, many tensors per message. `messages` keeps the message buffers for reuse. `write`
/// replaces copy_() to tensor `index`.
void broadcast_all(const std::vector<at::Tensor>& tensors, const ProcessGroup& group, int source,
                   std::vector<at::Tensor>* messages = nullptr, const Write& write = {}) {
  if (group.world_size() == 1) return;
  const at::NoGradGuard no_grad;
  constexpr std::size_t kMessageBytes = std::size_t{32} << 20;
  std::vector<at::Tensor> passing;
  if (!messages) messages = &passing;
  for (std::size_t begin = 0, message = 0; begin < tensors.size(); ++message) {
    const at::ScalarType dtype = tensors[begin].scalar_type();
    std::size_t end = begin;
    std::int64_t numel = 0;
    while (end < tensors.size() && tensors[end].scalar_type() == dtype &&
           (end == begin || static_cast<std::size_t>(numel) * c10::elementSize(dtype) < kMessageBytes))
      numel += tensors[end++].numel();
    if (message == messages->size()) messages->emplace_back();
    at::Tensor& flat = (*messages)[message];
    // The module may have been moved or cast between two forward passes.
    if (!flat.defined() || flat.numel() != numel || flat.scalar_type() != dtype ||
        flat.device() != tensors[begin].device())
      flat = at::empty({numel}, tensors[begin].options().requires_grad(false));
    const auto for_each_part = [&](const auto& action) {
      std::int64_t offset = 0;
      for (std::size_t i = begin; i < end; ++i) {
        const at::Tensor part = flat.narrow(0, offset, tensors[i].numel()).view(tensors[i].sizes());
        action(i, part);
        offset += tensors[i].numel();
      }
    };
    if (group.rank() == source) for_each_part([&](std::size_t i, const at::Tensor& part) { part.copy_(tensors[i]); });
    group.broadcast(flat.view(at::kByte), source);  // The shm backend lacks types such as float8.
    if (group.rank() != source && write) for_each_part(write);
    if (group.rank() != source && !write)
      for_each_part([&](std::size_t i, const at::Tensor& part) { tensors[i].copy_(part); });
    begin = end;
  }
}

/// The last `new_ranks` ranks get the values of former ranks, without a further copy where a tensor is dense.
void copy_to_new(const std::vector<at::Tensor>& tensors, const ProcessGroup& group, int new_ranks) {
  const bool is_new = group.rank() >= group.world_size() - new_ranks;
  for (const at::Tensor& tensor : tensors)
    transfer_bytes(tensor, is_new, [&](const at::Tensor& bytes) {
      const at::Tensor sent = bytes.to(group.device());  // Ignored tensors may be on another device.
      Joining::copy(group, new_ranks, sent);
      if (is_new && !sent.is_same(bytes)) bytes.copy_(sent);
    });
}

/// Tensors of one type share messages.
void sort_by_type(std::vector<at::Tensor>& tensors) {
  std::stable_sort(tensors.begin(), tensors.end(), [](const at::Tensor& one, const at::Tensor& other) {
    return one.scalar_type() < other.scalar_type();
  });
}

/// Returns each parameter once, including frozen parameters.
std::vector<NamedParameter> distinct_parameters(torch::nn::Module& module, const NamedTensors& names,
                                                const ProcessGroup& group) {
  std::vector<NamedParameter> parameters;
  const auto sparse = sparse_weights(module);
  // A tied parameter is registered under two names but has one gradient.
  std::unordered_set<const void*> seen;
  for (const auto& [name, tensor] : names) {
    const void* identity = tensor.unsafeGetTensorImpl();
    if (!seen.insert(identity).second) continue;
    if (tensor.requires_grad() && tensor.device() != group.device())
      throw InvalidArgument(
          fmt::format("parameter {} is on {}, but the group's device is {}: move the model first "
                      "(model->to(group.device()))",
                      name, tensor.device().str(), group.device().str()));
    parameters.push_back({.name = name, .tensor = tensor, .sparse = sparse.contains(identity)});
  }
  if (std::none_of(names.begin(), names.end(), [](const auto& entry) { return entry.second.requires_grad(); }))
    throw InvalidArgument("DistributedDataParallel needs a module with at least one parameter that wants a gradient");
  return parameters;
}

ReducerOptions options_of_reducer(const DistributedDataParallelOptions& options) {
  ReducerOptions result{.first_bucket_bytes = option_bytes(options.first_bucket_cap_mb, "first_bucket_cap_mb"),
                        .bucket_bytes = option_bytes(options.bucket_cap_mb, "bucket_cap_mb"),
                        .find_unused_parameters = options.find_unused_parameters,
                        .static_graph = options.static_graph,
                        .gradient_as_bucket_view = options.gradient_as_bucket_view,
                        .arena = options.arena};
  if (options.arena_mb) result.arena_bytes = option_bytes(*options.arena_mb, "arena_mb");
  return result;
}

/// For DDPKIT_DEBUG.
std::string text_of(const DistributedDataParallelOptions& options, const ProcessGroup& group) {
  return fmt::format("DistributedDataParallel on {} ranks, backend {}: {}, gradient_as_bucket_view {}, arena_mb {}",
                     group.world_size(), group.backend_name(), text_of(options), options.gradient_as_bucket_view,
                     options.arena_mb ? std::to_string(*options.arena_mb) : "automatic");
}

}  // namespace

class DistributedDataParallelBase::Impl {
 public:
  /// `broadcasts`: all ranks get rank 0's parameters and buffers.
  Impl(torch::nn::Module& module, ProcessGroup group, const DistributedDataParallelOptions& options,
       const std::shared_ptr<ParameterShards>& shards, bool broadcasts = true);

  void before_forward(const Joinable& self);
  void record_forward();
  void broadcast_model(int source);
  void shadow(int event, JoinContext& join);
  void regroup(int new_ranks);

  ProcessGroup group;
  std::optional<Timeline> timeline;
  std::unique_ptr<Reducer> reducer;

 private:
  bool broadcast_buffers(const Joinable& self);
  void write_buffer(std::size_t index, const at::Tensor& values);

  torch::nn::Module* module_;
  DistributedDataParallelOptions options_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> buffers_;
  std::vector<std::int64_t> buffer_versions_;  ///< Versions after the last broadcast. [buffer]
  std::vector<at::Tensor> buffer_messages_;    ///< Flat tensors for the broadcast of the buffers.
  std::weak_ptr<ShardOutput> shard_output_;    ///< Of the reducer before regroup(), until it is complete.
  Clock::time_point forward_began_;
};

DistributedDataParallelBase::Impl::Impl(torch::nn::Module& module, ProcessGroup process_group,
                                        const DistributedDataParallelOptions& options,
                                        const std::shared_ptr<ParameterShards>& shards, bool broadcasts)
    : group(std::move(process_group)), module_(&module), options_(options) {
  NamedTensors parameters, buffers;
  std::vector<NamedParameter> distinct;
  ReducerOptions reducer_options;
  check_same_model(group, "DistributedDataParallel", "the model differs between ranks", [&] {
    std::unordered_set<std::string> unknown(options.parameters_to_ignore.begin(), options.parameters_to_ignore.end());
    parameters = without(module.named_parameters(), options.parameters_to_ignore, unknown);
    buffers = without(module.named_buffers(), options.parameters_to_ignore, unknown);
    for (const auto& [name, tensor] : parameters) {
      if (!shards && GatheredParameter::is_gathered(tensor))
        throw InvalidArgument(fmt::format(
            "parameter {} is sharded by FullyShardedDataParallel: a module can be in only one of the two", name));
    }
    if (!unknown.empty())
      throw InvalidArgument(fmt::format("parameters_to_ignore names {}, but the module has no such parameter or buffer",
                                        fmt::join(unknown, ", ")));
    distinct = distinct_parameters(module, parameters, group);
    reducer_options = options_of_reducer(options);
    auto lines = describe_model(module, parameters, buffers);
    lines.insert(lines.begin(), text_of(options));
    return lines;
  });
  for (const auto& [name, parameter] : parameters) parameters_.push_back(parameter);
  for (const auto& [name, buffer] : buffers) buffers_.push_back(buffer);
  sort_by_type(parameters_);
  sort_by_type(buffers_);
  if (broadcasts && !shards) broadcast_all(parameters_, group, 0);
  if (broadcasts) broadcast_all(buffers_, group, 0);
  for (const at::Tensor& buffer : buffers_) buffer_versions_.push_back(buffer._version());
  if (debug_level() >= DebugLevel::kInfo && group.rank() == 0) debug_line(group, text_of(options_, group));
  reducer = std::make_unique<Reducer>(std::move(distinct), group, reducer_options);
  if (shards) Reducer::Impl::of(*reducer).set_parameter_shards(shards);
  if (const auto request = take_timeline_request()) {
    timeline.emplace(group, request->path);
    Reducer::Impl::of(*reducer).set_timeline(timeline, request->steps);
  }
}

void DistributedDataParallelBase::Impl::before_forward(const Joinable& self) {
  // A walk through the module is too expensive for every step.
  if (std::has_single_bit(Reducer::Impl::of(*reducer).backwards() + 1)) {
    std::unordered_set<std::string> ignored;
    check_all_wrapped(without(module_->named_parameters(), options_.parameters_to_ignore, ignored), parameters_, group);
  }
  // Single ranks may run an evaluation, which has no backward.
  reducer->prepare_for_forward(at::GradMode::is_enabled() && module_->is_training());
  if (JoinContext* join = JoinContext::of(self)) join->count_forward();
  const auto before = Clock::now();
  const bool broadcasts = broadcast_buffers(self);
  forward_began_ = Clock::now();
  if (timeline && broadcasts) timeline->add(activity(EventKind::kBroadcastBuffers, before, forward_began_));
}

/// Returns whether there was something to broadcast.
bool DistributedDataParallelBase::Impl::broadcast_buffers(const Joinable& self) {
  if (!options_.broadcast_buffers || buffers_.empty() || !module_->is_training()) return false;
  // During gradient accumulation, ranks may run different numbers of forward passes.
  if (!Reducer::Impl::of(*reducer).synchronize) return false;
  int source = 0;
  if (JoinContext* join = JoinContext::of(self)) {
    join->notify(self, kJoinBuffers);
    source = join->first_active(true);
  }
  try {
    broadcast_all(buffers_, group, source, &buffer_messages_,
                  [this](std::size_t index, const at::Tensor& values) { write_buffer(index, values); });
  } catch (const Error&) {
    rethrow_with_advice();
  }
  return true;
}

/// A graph that saved the buffer may still be used. Batch norm saves its statistics, does not read them in backward,
/// and updates them without a new version. A write with a new version would make autograd reject this graph. If all
/// updates since the last broadcast had no new version, this write has none either.
void DistributedDataParallelBase::Impl::write_buffer(std::size_t index, const at::Tensor& values) {
  const at::Tensor& buffer = buffers_[index];
  if (buffer._version() == buffer_versions_[index]) {
    const at::AutoDispatchBelowADInplaceOrView no_new_version;
    buffer.copy_(values);
  } else if (!buffer.is_cpu() || !at::equal(buffer, values)) {  // On a device, the comparison would block the host.
    buffer.copy_(values);
  }
  buffer_versions_[index] = buffer._version();
}

void DistributedDataParallelBase::Impl::record_forward() {
  if (timeline) timeline->add(activity(EventKind::kForward, forward_began_, Clock::now()));
}

void DistributedDataParallelBase::Impl::broadcast_model(int source) {
  broadcast_all(parameters_, group, source);
  broadcast_all(buffers_, group, source);
}

void DistributedDataParallelBase::Impl::regroup(int new_ranks) {
  if (reducer) {
    Reducer::Impl::of(*reducer).require_replicas("regroup");
    shard_output_ = Reducer::Impl::of(*reducer).shard_output();
  }
  reducer.reset();
  for (at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
  // The group has kept the arena, in which the next reducer continues.
  Impl next(*module_, group, options_, nullptr, /*broadcasts=*/false);
  if (new_ranks > 0) {  // Also the ignored tensors: a new rank has no other source of their values.
    copy_to_new(module_->parameters(), group, new_ranks);
    copy_to_new(module_->buffers(), group, new_ranks);
  }
  next.timeline = timeline;
  if (timeline) next.reducer->set_timeline(timeline);
  if (const auto output = shard_output_.lock()) output->regroup(*next.reducer, new_ranks);
  *this = std::move(next);
}

void DistributedDataParallelBase::Impl::shadow(int event, JoinContext& join) {
  switch (event) {
    case kJoinBuffers:
      return broadcast_all(buffers_, group, join.first_active(false));
    case kJoinBucket:
      return Reducer::Impl::of(*reducer).shadow_bucket();
    default:
      return Reducer::Impl::of(*reducer).shadow_end_of_backward();
  }
}

// ---- the public class

DistributedDataParallelBase::DistributedDataParallelBase(torch::nn::Module& module, ProcessGroup group,
                                                         const DistributedDataParallelOptions& options,
                                                         const std::shared_ptr<ParameterShards>& shards)
    : impl_(std::make_unique<Impl>(module, std::move(group), options, shards)) {}
DistributedDataParallelBase::~DistributedDataParallelBase() = default;
DistributedDataParallelBase::DistributedDataParallelBase(DistributedDataParallelBase&&) noexcept = default;
DistributedDataParallelBase& DistributedDataParallelBase::operator=(DistributedDataParallelBase&&) noexcept = default;

DistributedDataParallelBase::NoScope DistributedDataParallelBase::before_forward() {
  impl_->before_forward(*this);
  return {};
}
void DistributedDataParallelBase::record_forward() { impl_->record_forward(); }
const ProcessGroup& DistributedDataParallelBase::group() const noexcept { return impl_->group; }
Reducer& DistributedDataParallelBase::reducer() noexcept { return *impl_->reducer; }
const Reducer& DistributedDataParallelBase::reducer() const noexcept { return *impl_->reducer; }

void DistributedDataParallelBase::regroup(int new_ranks) { impl_->regroup(new_ranks); }

void DistributedDataParallelBase::set_timeline(std::optional<Timeline> timeline) {
  impl_->timeline = timeline;
  impl_->reducer->set_timeline(std::move(timeline));
}

void DistributedDataParallelBase::join_begin() { Reducer::Impl::of(reducer()).set_join(JoinContext::of(*this), *this); }
void DistributedDataParallelBase::join_shadow(int event) { impl_->shadow(event, *JoinContext::of(*this)); }
void DistributedDataParallelBase::join_end(int source) {
  Reducer::Impl::of(reducer()).set_join(nullptr, *this);
  if (source >= 0) impl_->broadcast_model(source);
}

void check_same_parameters(const DistributedDataParallelBase& ddp) {
  if (ddp.group().world_size() == 1) return;
  check_same_model(ddp.group(), "check_same_parameters", "the parameters differ between ranks", [&] {
    NamedTensors parameters;
    for (const auto& [name, tensor, sparse] : parameters_of(ddp.reducer())) parameters.emplace_back(name, tensor);
    return describe_values("parameter", parameters);
  });
}

}  // namespace ddpkit
