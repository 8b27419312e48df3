#include "gpt/model.h"

#include <torch/torch.h>

#include <cmath>
#include <memory>

#include <ddpkit/parallel/activation_checkpoint.h>

namespace gpt {
namespace {

constexpr double kDeviation = 0.02;

torch::nn::Linear make_linear(std::int64_t inputs, std::int64_t outputs, double deviation = kDeviation) {
  torch::nn::Linear linear(inputs, outputs);
  torch::nn::init::normal_(linear->weight, 0, deviation);
  torch::nn::init::zeros_(linear->bias);
  return linear;
}

torch::nn::Embedding make_embedding(std::int64_t count, std::int64_t width) {
  torch::nn::Embedding embedding(count, width);
  torch::nn::init::normal_(embedding->weight, 0, kDeviation);
  return embedding;
}

torch::nn::LayerNorm make_norm(std::int64_t width) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
}

}  // namespace

Block::Block(const ModelOptions& options) : heads_(options.heads), dropout_(options.dropout) {
  const std::int64_t width = options.width;
  // Each block adds two terms to the residual stream.
  const double scaled = kDeviation / std::sqrt(2.0 * static_cast<double>(options.layers));
  attention_norm_ = register_module("attention_norm", make_norm(width));
  qkv_ = register_module("qkv", make_linear(width, 3 * width));
  projection_ = register_module("projection", make_linear(width, width, scaled));
  mlp_norm_ = register_module("mlp_norm", make_norm(width));
  up_ = register_module("up", make_linear(width, 4 * width));
  down_ = register_module("down", make_linear(4 * width, width, scaled));
}

at::Tensor Block::forward(const at::Tensor& x) {
  const std::int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
  const auto parts =
      qkv_(attention_norm_(x)).view({batch, length, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4}).unbind(0);
  const at::Tensor attended = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], /*attn_mask=*/{},
                                                               is_training() ? dropout_ : 0, /*is_causal=*/true);
  const at::Tensor y = x + torch::dropout(projection_(attended.transpose(1, 2).reshape({batch, length, width})),
                                          dropout_, is_training());
  return y + torch::dropout(down_(torch::gelu(up_(mlp_norm_(y)))), dropout_, is_training());
}

Gpt::Gpt(const ModelOptions& options) : options_(options) {
  tokens_ = register_module("tokens", make_embedding(options.tokens, options.width));
  positions_ = register_module("positions", make_embedding(options.context, options.width));
  blocks_ = register_module("blocks", torch::nn::ModuleList());
  for (std::int64_t layer = 0; layer < options.layers; ++layer) blocks_->push_back(std::make_shared<Block>(options));
  norm_ = register_module("norm", make_norm(options.width));
}

at::Tensor Gpt::forward(const at::Tensor& ids) {
  at::Tensor x = tokens_(ids) + positions_(torch::arange(ids.size(1), ids.options()));
  for (const auto& module : *blocks_) {
    const auto block = std::static_pointer_cast<Block>(module);
    if (options_.activation_checkpointing)
      x = ddpkit::activation_checkpoint([block](const at::Tensor& input) { return block->forward(input); }, x);
    else
      x = block->forward(x);
  }
  return torch::linear(norm_(x), tokens_->weight);
}

}  // namespace gpt
