#include <ddpkit/parallel/data_parallel.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <string>
#include <utility>

#include <ddpkit/comm/error.h>
#include <ddpkit/comm/local_launch.h>

#include "comm/backends.h"
#include "parallel/replica_random.h"
#include "parallel/replica_set.h"
#include "parallel/replica_streams.h"
#include "parallel/replica_threads.h"
#include "parallel/replicas_backward.h"
#include "parallel/scatter_gather.h"

namespace ddpkit {
namespace {

using Tensors = std::vector<at::Tensor>;

std::size_t bytes_of(double mib, const char* option) {
  if (!(mib > 0) || !std::isfinite(mib))
    throw InvalidArgument(fmt::format("DataParallel: {} is {} MiB: it must be more than 0", option, mib));
  return static_cast<std::size_t>(mib * (1 << 20));
}

std::vector<c10::Device> resolved_devices(const DataParallelOptions& options) {
  std::vector<c10::Device> devices = options.devices;
  for (c10::Device& device : devices) {
    if (device.type() != devices[0].type() || (!device.is_cpu() && !device.is_cuda()))
      throw InvalidArgument(fmt::format("DataParallel's replicas are on CPUs or on CUDA devices, but not on {} and {}",
                                        devices[0].str(), device.str()));
    if (device.is_cpu()) continue;
    if (!device.has_index()) device.set_index(0);
    if (device.index() >= cuda_device_count())
      throw InvalidArgument(fmt::format("DataParallel: a replica is to be on {}, but this build and host have {} GPUs",
                                        device.str(), cuda_device_count()));
  }
  if (!devices.empty()) {
    if (options.replicas && *options.replicas != static_cast<int>(options.devices.size()))
      throw InvalidArgument(fmt::format("DataParallel: {} replicas on {} devices: give one of the two",
                                        *options.replicas, options.devices.size()));
    return devices;
  }
  const int replicas = options.replicas.value_or(available_cores());
  if (replicas < 1) throw InvalidArgument(fmt::format("DataParallel: {} replicas: at least 1", replicas));
  return std::vector<c10::Device>(static_cast<std::size_t>(replicas), c10::Device(c10::kCPU));
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
  /// Gradients of the call's wanted inputs, then of its parameters.
  Tensors run_backward(const ReplicasCall& call, const Tensors& gradients, bool keep_graph);
  Tensors run_backward_on_devices(const ReplicasCall& call, const Tensors& gradients, bool keep_graph);

  std::vector<c10::Device> devices;
  int threads_each;
  ReplicaStreams streams;
  std::shared_ptr<ReplicaSet> set;

 private:
  void follow() {
    if (!set->follow(broadcast_buffers_)) replicate();
  }
  void run_replicas(std::size_t count, const std::function<void(int)>& job);
  Tensors with_graph(Tensors outputs, const Tensors& inputs, ReplicasCall call);

  std::shared_ptr<torch::nn::Module> module_;
  std::size_t first_bucket_bytes_;
  std::size_t bucket_bytes_;
  bool broadcast_buffers_;
  std::mutex mutex_;  ///< One call at a time, also where backwards run in several threads.
  ReplicaThreads threads_;
};

DataParallelBase::Impl::Impl(std::shared_ptr<torch::nn::Module> module, const DataParallelOptions& options)
    : devices(resolved_devices(options)),
      threads_each(
          options.threads_per_replica.value_or(std::max(1, available_cores() / static_cast<int>(devices.size())))),
      streams(devices),
      module_(std::move(module)),
      first_bucket_bytes_(bytes_of(options.first_bucket_cap_mb, "first_bucket_cap_mb")),
      bucket_bytes_(bytes_of(options.bucket_cap_mb, "bucket_cap_mb")),
      broadcast_buffers_(options.broadcast_buffers),
      threads_(devices, threads_each < 1 ? throw InvalidArgument(fmt::format(
                                               "DataParallel: {} threads in a replica: at least 1", threads_each))
                                         : threads_each) {
  replicate();
}

void DataParallelBase::Impl::replicate() {
  streams.fork();
  set = std::make_shared<ReplicaSet>(module_, devices, streams, first_bucket_bytes_, bucket_bytes_);
}

/// In the replicas' threads, on the replicas' streams; afterwards the caller's streams wait for those.
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
  const Cuts cuts = cut(std::max<std::int64_t>(batch_size(inputs), 0), static_cast<int>(devices.size()));
  const std::size_t active = cuts.size() - 1;
  ReplicasCall call{.set = set,
                    .inputs = {},
                    .outputs = std::vector<Tensors>(active),
                    .wanted_inputs = {},
                    .wanted_devices = {},
                    .outputs_of = {}};
  for (std::size_t r = 0; r < active; ++r) call.inputs.push_back(part_of(inputs, cuts, r, gradients, devices[r]));
  run_replicas(active, [&](int r) {
    const auto index = static_cast<std::size_t>(r);
    call.outputs[index] = forward(r, call.inputs[index]);
  });
  Tensors outputs = joined(call.outputs, devices.size() > 1);
  return gradients ? with_graph(std::move(outputs), inputs, std::move(call)) : outputs;
}

/// Hangs the outputs on a node of their own, from which edges lead to the inputs and parameters.
Tensors DataParallelBase::Impl::with_graph(Tensors outputs, const Tensors& inputs, ReplicasCall call) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const bool wanted = std::any_of(call.outputs.begin(), call.outputs.end(), [i](const Tensors& of_replica) {
      return of_replica[i].defined() && of_replica[i].requires_grad();
    });
    if (wanted) call.outputs_of.push_back(i);
  }
  if (call.outputs_of.empty()) return outputs;
  torch::autograd::edge_list edges;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined() || !inputs[i].requires_grad()) continue;
    call.wanted_inputs.push_back(i);
    call.wanted_devices.push_back(inputs[i].device());
    edges.push_back(torch::autograd::impl::gradient_edge(inputs[i]));
  }
  for (const at::Tensor& parameter : set->parameters())
    edges.push_back(torch::autograd::impl::gradient_edge(parameter));
  const std::vector<std::size_t> wanted = call.outputs_of;
  const auto node = std::make_shared<ReplicasBackward>(
      std::move(call),
      [self = shared_from_this()](const ReplicasCall& made, const Tensors& gradients, bool keep_graph) {
        return self->run_backward(made, gradients, keep_graph);
      });
  node->set_next_edges(std::move(edges));
  for (const std::size_t i : wanted) torch::autograd::set_history(outputs[i], node);
  return outputs;
}

namespace {

/// Appends the outputs of replica `r` that have come out of the node with a gradient, and those gradients.
void add_roots(const ReplicasCall& call, const Tensors& gradients, std::size_t r, Tensors& roots,
               Tensors& root_gradients) {
  for (std::size_t k = 0; k < gradients.size(); ++k) {
    const at::Tensor& output = call.outputs[r][call.outputs_of[k]];
    if (!gradients[k].defined() || !output.requires_grad()) continue;
    roots.push_back(output);
    root_gradients.push_back(
        gradient_part(gradients[k], call.outputs, call.outputs_of[k], r).to(output.device(), /*non_blocking=*/true));
  }
}

/// The gradient of wanted input `k`, from its parts' gradients. [replica]
at::Tensor join_input_gradient(const ReplicasCall& call, std::size_t k, const Tensors& gradients) {
  Tensors parts;
  bool any = false;
  for (std::size_t r = 0; r < gradients.size(); ++r) {
    any = any || gradients[r].defined();
    const at::Tensor& input = call.inputs[r][call.wanted_inputs[k]];
    parts.push_back((gradients[r].defined() ? gradients[r] : at::zeros_like(input)).to(call.wanted_devices[k]));
  }
  return !any                  ? at::Tensor()
         : parts.size() == 1   ? parts[0]
         : parts[0].dim() == 0 ? at::stack(parts).sum(0)
                               : at::cat(parts);
}

}  // namespace

Tensors DataParallelBase::Impl::run_backward(const ReplicasCall& call, const Tensors& gradients, bool keep_graph) {
  if (streams.used()) return run_backward_on_devices(call, gradients, keep_graph);
  threads_.refuse_nested();
  const std::lock_guard lock(mutex_);
  const int active = static_cast<int>(call.outputs.size());
  ReplicaGradients& sums = call.set->gradients();
  const auto clean = [&] {
    sums.drop();
    for (const Tensors& inputs : call.inputs) {
      for (const std::size_t i : call.wanted_inputs) inputs[i].mutable_grad().reset();
    }
  };
  sums.begin(active);
  try {
    threads_.run(active, [&](int r) {
      sums.take_part(r, [&] {
        Tensors roots, root_gradients;
        add_roots(call, gradients, static_cast<std::size_t>(r), roots, root_gradients);
        sums.start_backward(r);
        if (!roots.empty()) torch::autograd::backward(roots, root_gradients, keep_graph);
      });
    });
  } catch (...) {
    clean();
    throw;
  }
  Tensors results;
  for (std::size_t k = 0; k < call.wanted_inputs.size(); ++k) {
    Tensors parts;
    for (const Tensors& inputs : call.inputs) parts.push_back(inputs[call.wanted_inputs[k]].grad());
    results.push_back(join_input_gradient(call, k, parts));
  }
  for (std::size_t p = 0; p < call.set->parameters().size(); ++p) results.push_back(sums.sum(p));
  clean();
  return results;
}

/// On autograd's thread of the first device. If it waited for the replicas' own threads, their backwards, which need
/// this thread, would never run: instead one backward within this one runs them all, with the other devices' threads.
/// It touches nothing that is shared, since autograd may run another node like this one meanwhile.
Tensors DataParallelBase::Impl::run_backward_on_devices(const ReplicasCall& call, const Tensors& gradients,
                                                        bool keep_graph) {
  const ReplicaStreams::CallerScope scope(streams);
  const std::size_t active = call.outputs.size(), wanted = call.wanted_inputs.size();
  const std::size_t count = call.set->parameters().size();
  Tensors roots, root_gradients, leaves;
  for (std::size_t r = 0; r < active; ++r) {
    add_roots(call, gradients, r, roots, root_gradients);
    for (const std::size_t i : call.wanted_inputs) leaves.push_back(call.inputs[r][i]);
    const Tensors& parameters = call.set->gradients().leaves()[r];
    leaves.insert(leaves.end(), parameters.begin(), parameters.end());
  }
  Tensors results(wanted + count);
  if (roots.empty() || leaves.empty()) return results;
  streams.begin();
  // When it returns, the current streams wait for whatever has made its results.
  const Tensors made = torch::autograd::grad(roots, leaves, root_gradients, keep_graph, /*create_graph=*/false,
                                             /*allow_unused=*/true);
  streams.join();
  for (std::size_t i = 0; i < results.size(); ++i) {
    Tensors of_replicas;
    for (std::size_t r = 0; r < active; ++r) of_replicas.push_back(made[r * results.size() + i]);
    results[i] = i < wanted ? join_input_gradient(call, i, of_replicas) : sum_on_first(of_replicas, devices[0]);
  }
  return results;
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
                       "your own, put a map_tensors() beside it (map_tensors.h)");
  follow();
  const Cuts cuts = cut(samples, static_cast<int>(devices.size()));
  const std::size_t active = cuts.size() - 1;
  const auto weight = [&](std::size_t r) {
    return static_cast<double>(cuts[r + 1] - cuts[r]) / static_cast<double>(samples);
  };
  std::vector<Tensors> parts;
  for (std::size_t r = 0; r < active; ++r) parts.push_back(part_of(batch, cuts, r, false, devices[r]));
  Tensors losses(active);
  ReplicaGradients& sums = set->gradients();
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
