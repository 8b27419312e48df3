#include "asr/lmu.h"

#include <torch/torch.h>

#include "asr/legendre_memory.h"

namespace asr {

LmuLayerImpl::LmuLayerImpl(const LmuOptions& options) : options_(options), memory_(options.order, options.theta) {
  reset();
}

void LmuLayerImpl::reset() {
  const std::int64_t remembered = options_.order * options_.memory_channels;
  to_memory_ = register_module("to_memory", torch::nn::Linear(options_.width, options_.memory_channels));
  from_memory_ = register_module("from_memory", torch::nn::Linear(remembered, options_.width));
  direct_ = register_module("direct",
                            torch::nn::Linear(torch::nn::LinearOptions(options_.width, options_.width).bias(false)));
}

at::Tensor LmuLayerImpl::forward(const at::Tensor& x) {
  return torch::gelu(memory_.project(to_memory_(x), from_memory_->weight, from_memory_->bias) + direct_(x));
}

at::Tensor LmuLayerImpl::step(const at::Tensor& x, at::Tensor& state) {
  if (!state.defined())
    state = torch::zeros({x.size(0), options_.order, options_.memory_channels}, x.options().dtype(torch::kFloat));
  state = memory_.step(to_memory_(x), state);
  return torch::gelu(from_memory_(state.flatten(1)) + direct_(x));
}

}  // namespace asr
