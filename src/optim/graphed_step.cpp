#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>
#include <utility>

#include <ddpkit/error.h>
#include <ddpkit/optim/graphed_step.h>

#include "comm/cuda.h"
#include "comm/device_index.h"
#include "optim/fused_optimizer.h"
#include "parallel/sharding/gathered_use.h"
#include "tensor/stream_set.h"

namespace ddpkit::optim {
namespace {

c10::impl::VirtualGuardImpl cuda_guard() { return c10::impl::VirtualGuardImpl(c10::kCUDA); }

}  // namespace

class GraphedStep::Impl {
 public:
  Impl(c10::Device device, std::vector<FusedOptimizer*> optimizers, Step step, int warmup_iterations)
      : device_(device),
        stream_(cuda_guard().getStreamFromGlobalPool(device)),
        optimizers_(std::move(optimizers)),
        step_(std::move(step)),
        eager_calls_(warmup_iterations) {}

  bool captured() const noexcept { return graph_ != nullptr; }

  Tensors call(const Tensors& inputs) {
    const NoGathers no_gathers(
        "GraphedStep does not support FullyShardedDataParallel: before each gather, the ranks compare numbers on the "
        "host, which a CUDA graph does not repeat; call the step without GraphedStep");
    const c10::Stream caller = cuda_guard().getStream(device_);
    // Inputs are allocated on one stream and released on the other, also if the step throws.
    for (const at::Tensor& input : inputs) {
      if (input.is_cuda()) input.record_stream(stream_);
    }
    Tensors outputs;
    {
      const c10::StreamGuard on_stream(stream_);
      stream_waits(stream_, caller);  // Waits for the inputs and for writes of the caller to the weights.
      if (!graph_ && eager_calls_ > 0) {
        --eager_calls_;
        outputs = step_(inputs);
      } else {
        if (!graph_) capture(inputs);
        replay(inputs);
        outputs = outputs_;
      }
    }
    stream_waits(caller, stream_);  // The caller waits for the outputs and the weights.
    if (!graph_) {                  // The graph's memory is private.
      for (const at::Tensor& output : outputs) {
        if (output.is_cuda()) output.record_stream(caller);
      }
    }
    return outputs;
  }

 private:
  void capture(const Tensors& inputs) {
    for (const at::Tensor& input : inputs) {
      if (input.device() != device_)
        throw InvalidArgument(
            fmt::format("GraphedStep: the inputs must be on {}, not on {}", device_.str(), input.device().str()));
      inputs_.push_back(input.detach().clone());
    }
    // A capture must not wait for work that is still running.
    cuda_guard().synchronizeDevice(device_.index());
    auto graph = cuda::create_graph();
    for (FusedOptimizer* optimizer : optimizers_) FusedOptimizer::Impl::of(*optimizer).begin_capture();
    graph->begin_capture();
    try {
      outputs_ = step_(inputs_);
    } catch (const std::exception& error) {
      try {
        graph->end_capture();
      } catch (const std::exception&) {
        // The first error has the cause.
      }
      for (FusedOptimizer* optimizer : optimizers_) FusedOptimizer::Impl::of(*optimizer).end_capture();
      inputs_.clear();
      throw Error(fmt::format("GraphedStep could not capture the step: {}", error.what()), {.call = "GraphedStep"});
    }
    graph->end_capture();
    graph_ = std::move(graph);
    for (FusedOptimizer* optimizer : optimizers_) FusedOptimizer::Impl::of(*optimizer).end_capture();
  }

  void replay(const Tensors& inputs) {
    const at::NoGradGuard no_grad;
    if (inputs.size() != inputs_.size())
      throw InvalidArgument(fmt::format("GraphedStep: {} inputs, but {} were captured", inputs.size(), inputs_.size()));
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].sizes() != inputs_[i].sizes() || inputs[i].scalar_type() != inputs_[i].scalar_type())
        throw InvalidArgument(fmt::format("GraphedStep: input {} is [{}] {}, but [{}] {} was captured", i,
                                          fmt::join(inputs[i].sizes(), ", "), c10::toString(inputs[i].scalar_type()),
                                          fmt::join(inputs_[i].sizes(), ", "),
                                          c10::toString(inputs_[i].scalar_type())));
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) inputs_[i].copy_(inputs[i], /*non_blocking=*/true);
    for (FusedOptimizer* optimizer : optimizers_) FusedOptimizer::Impl::of(*optimizer).before_replay();
    graph_->replay();
  }

  c10::Device device_;
  c10::Stream stream_;
  std::vector<FusedOptimizer*> optimizers_;
  Step step_;
  int eager_calls_;
  Tensors inputs_, outputs_;
  std::shared_ptr<cuda::Graph> graph_;
};

GraphedStep::GraphedStep(c10::Device device, std::vector<FusedOptimizer*> optimizers, Step step,
                         const GraphedStepOptions& options) {
  if (!device.is_cuda() || cuda::device_count() == 0)
    throw InvalidArgument(
        fmt::format("GraphedStep captures CUDA graphs, but this build and host have none on {}: call the step as it is",
                    device.str()));
  if (options.warmup_iterations < 3)
    throw InvalidArgument(
        fmt::format("GraphedStep: warmup_iterations is {}, but must be at least 3", options.warmup_iterations));
  for (const FusedOptimizer* optimizer : optimizers) {
    if (!optimizer->fused_options().capturable)
      throw InvalidArgument("GraphedStep: an optimizer must be made with FusedOptions{.capturable = true}");
  }
  impl_ = std::make_unique<Impl>(with_index(device, cuda_guard().getDevice().index()), std::move(optimizers),
                                 std::move(step), options.warmup_iterations);
}

GraphedStep::~GraphedStep() = default;

GraphedStep::Tensors GraphedStep::operator()(const Tensors& inputs) { return impl_->call(inputs); }

bool GraphedStep::captured() const noexcept { return impl_->captured(); }

}  // namespace ddpkit::optim
