// Tier 2: torch/nn/module.h.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>

namespace gpt {

struct ModelOptions {
  std::int64_t tokens = 0;
  std::int64_t layers = 4;
  std::int64_t width = 128;
  std::int64_t heads = 4;
  std::int64_t context = 128;
  double dropout = 0;
  bool activation_checkpointing = false;
};

/// Attention to earlier characters, then a multi-layer perceptron, each after a layer norm.
class Block : public torch::nn::Module {
 public:
  explicit Block(const ModelOptions& options);
  /// `x` [batch, character, width]; returns the same shape.
  at::Tensor forward(const at::Tensor& x);

 private:
  std::int64_t heads_;
  double dropout_;
  torch::nn::LayerNorm attention_norm_{nullptr}, mlp_norm_{nullptr};
  torch::nn::Linear qkv_{nullptr}, projection_{nullptr}, up_{nullptr}, down_{nullptr};
};

/// GPT-2 (Radford and others, 2019). The head's weight is that of the embedding. The blocks are the units of
/// FullyShardedDataParallel.
class Gpt : public torch::nn::Module {
 public:
  /// Draws the weights from torch's default generator: seed the generator first.
  explicit Gpt(const ModelOptions& options);
  /// `ids` [batch, character], at most `context` characters; returns logits [batch, character, tokens].
  at::Tensor forward(const at::Tensor& ids);

 private:
  ModelOptions options_;
  torch::nn::Embedding tokens_{nullptr}, positions_{nullptr};
  torch::nn::ModuleList blocks_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
};

}  // namespace gpt
