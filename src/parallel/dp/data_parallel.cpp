#include <ddpkit/parallel/data_parallel.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include <ddpkit/comm/environment.h>
#include <ddpkit/error.h>

#include "comm/arena_allocator.h"
#include "comm/cuda.h"
#include "comm/device_index.h"
#include "comm/host.h"
#include "parallel/dp/gathered_backward.h"
#include "parallel/dp/replica_random.h"
#include "parallel/dp/scatter_gather.h"
#include "parallel/option_bytes.h"

namespace ddpkit {
namespace {

using Tensors = std::vector<at::Tensor>;

/// Returns the module's device, then all other GPUs.
std::vector<c10::Device> all_gpus(c10::Device first) {
  std::vector<c10::Device> devices = {first};
  for (int index = 0; index < cuda::device_count(); ++index) {
    if (index != first.index()) devices.emplace_back(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
  }
  return devices;
}

std::vector<c10::Device> resolved_devices(const torch::nn::Module& module, const DataParallelOptions& options) {
  std::vector<c10::Device> devices = options.devices;
  for (c10::Device& device : devices) {
    if (device.type() != devices[0].type() || (!device.is_cpu() && !device.is_cuda()))
      throw InvalidArgument(fmt::format("DataParallel's replicas are on CPUs or on CUDA devices, but not on {} and {}",
                                        devices[0].str(), device.str()));
    if (device.is_cpu()) continue;
    device = with_index(device, 0);
    if (device.index() >= cuda::device_count())
      throw InvalidArgument(fmt::format("DataParallel: a replica is to be on {}, but this build and host have {} GPUs",
                                        device.str(), cuda::device_count()));
  }
  if (!devices.empty()) {
    if (options.replicas && *options.replicas != static_cast<int>(options.devices.size()))
      throw InvalidArgument(fmt::format("DataParallel: {} replicas on {} devices: give one of the two",
                                        *options.replicas, options.devices.size()));
    return devices;
  }
  const std::vector<at::Tensor> parameters = module.parameters();
  if (!options.replicas && !parameters.empty() && parameters[0].is_cuda()) return all_gpus(parameters[0].device());
  const int replicas = options.replicas.value_or(available_cores());
  if (replicas < 1) throw InvalidArgument(fmt::format("DataParallel: {} replicas: at least 1", replicas));
  return std::vector<c10::Device>(static_cast<std::size_t>(replicas), c10::Device(c10::kCPU));
}

std::shared_ptr<ScopedArena> open_arena(const torch::nn::Module& module, std::size_t replicas,
                                        const DataParallelOptions& options) {
  if (options.arena_mb) option_bytes(*options.arena_mb, "DataParallel: arena_mb");
  if (!options.arena) return nullptr;
  std::size_t gradients = 0;
  for (const at::Tensor& parameter : module.parameters()) gradients += parameter.nbytes();
  const std::size_t wanted = std::min(std::max(8 * replicas * gradients, std::size_t{1} << 30), arena_budget(1));
  return ScopedArena::open_private(options.arena_mb ? option_bytes(*options.arena_mb, "DataParallel: arena_mb")
                                                    : wanted);
}

/// Adds to a parameter's gradient as backward does.
void add_gradient(const at::Tensor& parameter, const at::Tensor& gradient) {
  at::Tensor& there = parameter.mutable_grad();
  if (!there.defined()) {
    there = gradient;
  } else if (there.is_sparse() || gradient.is_sparse()) {
    there = there.is_sparse() ? gradient + there : there + gradient;
  } else {
    there.add_(gradient);
  }
}

}  // namespace

class DataParallelBase::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(std::shared_ptr<torch::nn::Module> module, const DataParallelOptions& options);

  void replicate();
  Tensors run_forward(const Tensors& inputs, const std::function<Tensors(int, const Tensors&)>& forward);
  at::Tensor run_step(const Tensors& batch, const std::function<at::Tensor(int, const Tensors&)>& loss);
  Tensors run_backward(const ReplicasCall& call, const Tensors& gradients, bool keep_graph);

  std::vector<c10::Device> devices;
  int threads_each;
  ReplicaStreams streams;
  std::shared_ptr<ScopedArena> arena;
  std::shared_ptr<Replicas> set;

 private:
  void follow() {
    if (!set->follow(broadcast_buffers_)) replicate();
  }
  void run_replicas(std::size_t count, const std::function<void(int)>& job);

  std::shared_ptr<torch::nn::Module> module_;
  std::size_t first_bucket_bytes_;
  std::size_t bucket_bytes_;
  bool broadcast_buffers_;
  std::mutex mutex_;  ///< Serializes calls, even if backwards run in several threads.
  ReplicaThreads threads_;
};

DataParallelBase::Impl::Impl(std::shared_ptr<torch::nn::Module> module, const DataParallelOptions& options)
    : devices(resolved_devices(*module, options)),
      threads_each(
          options.threads_per_replica.value_or(std::max(1, available_cores() / static_cast<int>(devices.size())))),
      streams(devices),
      arena(streams.used() ? nullptr : open_arena(*module, devices.size(), options)),
      module_(std::move(module)),
      first_bucket_bytes_(option_bytes(options.first_bucket_cap_mb, "DataParallel: first_bucket_cap_mb")),
      bucket_bytes_(option_bytes(options.bucket_cap_mb, "DataParallel: bucket_cap_mb")),
      broadcast_buffers_(options.broadcast_buffers),
      threads_(devices, threads_each < 1 ? throw InvalidArgument(fmt::format(
                                               "DataParallel: {} threads in a replica: at least 1", threads_each))
                                         : threads_each) {
  replicate();
}

void DataParallelBase::Impl::replicate() {
  streams.fork();
  set = std::make_shared<Replicas>(module_, devices, streams, first_bucket_bytes_, bucket_bytes_);
}

/// Runs `job` on the replicas' threads and streams. The caller's streams then wait for the replicas' streams.
void DataParallelBase::Impl::run_replicas(std::size_t count, const std::function<void(int)>& job) {
  if (!streams.used()) {
    ReplicaSeed seed;
    return threads_.run(static_cast<int>(count), [&](int r) {
      const ReplicaRandom random(seed, r);
      job(r);
    });
  }
  streams.fork();
  try {
    threads_.run(static_cast<int>(count), [&](int r) {
      const ReplicaStreams::Scope scope(streams, static_cast<std::size_t>(r));
      job(r);
    });
  } catch (...) {
    streams.join();
    throw;
  }
  streams.join();
}

Tensors DataParallelBase::Impl::run_forward(const Tensors& inputs,
                                            const std::function<Tensors(int, const Tensors&)>& forward) {
  std::unique_lock lock(mutex_, std::defer_lock);
  threads_.refuse_nested();
  lock.lock();
  follow();
  const bool gradients = c10::GradMode::is_enabled();
  const ChunkOffsets offsets = chunk(std::max<std::int64_t>(batch_size(inputs), 0), static_cast<int>(devices.size()));
  const std::size_t active = offsets.size() - 1;
  ReplicasCall call{.set = set, .inputs = {}, .outputs = std::vector<Tensors>(active)};
  for (std::size_t r = 0; r < active; ++r) call.inputs.push_back(scatter(inputs, offsets, r, gradients, devices[r]));
  run_replicas(active, [&](int r) {
    const auto index = static_cast<std::size_t>(r);
    call.outputs[index] = forward(r, call.inputs[index]);
  });
  Tensors outputs = gather(call.outputs, devices.size() > 1);
  if (gradients)
    connect_graph(outputs, inputs, std::move(call),
                  [self = shared_from_this()](const ReplicasCall& made, const Tensors& from, bool keep_graph) {
                    return self->run_backward(made, from, keep_graph);
                  });
  return outputs;
}

Tensors DataParallelBase::Impl::run_backward(const ReplicasCall& call, const Tensors& gradients, bool keep_graph) {
  if (streams.used()) return backward_on_devices(call, gradients, keep_graph, streams);
  threads_.refuse_nested();
  const std::lock_guard lock(mutex_);
  return backward_in_threads(call, gradients, keep_graph, threads_);
}

at::Tensor DataParallelBase::Impl::run_step(const Tensors& batch,
                                            const std::function<at::Tensor(int, const Tensors&)>& loss) {
  threads_.refuse_nested();
  const std::lock_guard lock(mutex_);
  if (!c10::GradMode::is_enabled())
    throw InvalidArgument("DataParallel::train_step() runs backward, and gradients are switched off (a NoGradGuard?)");
  const std::int64_t samples = batch_size(batch);
  if (samples < 1)
    throw InvalidArgument(
        samples == 0 ? "DataParallel::train_step(): the batch is empty"
                     : "DataParallel::train_step(): the batch holds no tensor with a dim 0 to cut. If it is a type of "
                       "your own, put a map_tensors() beside it (pytree.h)");
  follow();
  const ChunkOffsets offsets = chunk(samples, static_cast<int>(devices.size()));
  const std::size_t active = offsets.size() - 1;
  const auto weight = [&](std::size_t r) {
    return static_cast<double>(offsets[r + 1] - offsets[r]) / static_cast<double>(samples);
  };
  std::vector<Tensors> parts;
  for (std::size_t r = 0; r < active; ++r) parts.push_back(scatter(batch, offsets, r, false, devices[r]));
  Tensors losses(active);
  GradientSum& sums = set->gradients();
  sums.begin(static_cast<int>(active));
  try {
    run_replicas(active, [&](int r) {
      sums.take_part(r, [&] {
        const auto index = static_cast<std::size_t>(r);
        const at::Tensor mine = loss(r, parts[index]);
        if (!mine.defined() || mine.numel() != 1 || !mine.requires_grad())
          throw InvalidArgument(
              "train_step()'s loss function must return one number that depends on the replica's "
              "parameters: the mean loss over its part of the batch");
        losses[index] = mine.detach().reshape({}) * weight(index);
        sums.start_backward(r);
        torch::autograd::backward({mine}, {at::full_like(mine, weight(index))});
      });
    });
  } catch (...) {
    sums.drop();
    throw;
  }
  const at::NoGradGuard no_grad;
  for (std::size_t p = 0; p < set->parameters().size(); ++p) {
    if (sums.sum(p).defined()) add_gradient(set->parameters()[p], sums.sum(p));
  }
  sums.drop();
  at::Tensor total = losses[0];
  for (std::size_t r = 1; r < active; ++r) total = total + losses[r].to(total.device());
  return total;
}

DataParallelBase::DataParallelBase(std::shared_ptr<torch::nn::Module> module, const DataParallelOptions& options)
    : impl_(std::make_shared<Impl>(std::move(module), options)) {}

const std::vector<c10::Device>& DataParallelBase::devices() const noexcept { return impl_->devices; }
int DataParallelBase::replicas() const noexcept { return static_cast<int>(impl_->devices.size()); }
int DataParallelBase::threads_per_replica() const noexcept { return impl_->threads_each; }
const std::vector<std::vector<std::size_t>>& DataParallelBase::buckets() const noexcept {
  return impl_->set->gradients().buckets();
}
std::optional<ArenaStats> DataParallelBase::arena() const {
  return impl_->arena ? std::optional(impl_->arena->stats()) : std::nullopt;
}
void DataParallelBase::replicate() { impl_->replicate(); }

torch::nn::Module& DataParallelBase::replica(int index) const {
  return impl_->set->module(static_cast<std::size_t>(index));
}

DataParallelBase::Tensors DataParallelBase::run_forward(const Tensors& inputs,
                                                        const std::function<Tensors(int, const Tensors&)>& forward) {
  return impl_->run_forward(inputs, forward);
}

at::Tensor DataParallelBase::run_step(const Tensors& batch,
                                      const std::function<at::Tensor(int, const Tensors&)>& loss) {
  return impl_->run_step(batch, loss);
}

}  // namespace ddpkit
