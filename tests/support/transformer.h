// A small transformer with tied embeddings.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <stdexcept>

namespace ddpkit::testing {

struct BlockImpl : torch::nn::Module {
  BlockImpl(int width, int heads, double dropout) : heads(heads), dropout(dropout) {
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
    out = register_module("out", torch::nn::Linear(width, width));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }
  at::Tensor forward(at::Tensor x) {
    const auto batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts = qkv(norm1(x)).view({batch, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto attended = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    x = x + torch::dropout(out(attended.transpose(1, 2).reshape({batch, length, width})), dropout, is_training());
    return x + down(torch::gelu(up(norm2(x))));
  }
  int heads;
  double dropout;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

/// A transformer whose head is its embedding.
struct GptImpl : torch::nn::Module {
  explicit GptImpl(double dropout = 0, int width = 32, int layers = 6, int vocabulary = 41) {
    torch::manual_seed(3);
    tokens = register_module("tokens", torch::nn::Embedding(vocabulary, width));
    positions = register_module("positions", torch::nn::Embedding(64, width));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < layers; ++i) blocks->push_back(Block(width, 4, dropout));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
  }
  std::shared_ptr<BlockImpl> block(std::size_t i) { return std::dynamic_pointer_cast<BlockImpl>(blocks->ptr(i)); }
  at::Tensor forward(const at::Tensor& ids) {
    auto x = tokens(ids) + positions(torch::arange(ids.size(1), ids.options()));
    for (std::size_t i = 0; i < blocks->size(); ++i) {
      if (static_cast<int>(i) == throws_at) throw std::runtime_error("forward failed");
      const auto one = block(swaps && (i == 1 || i == 2) ? 3 - i : i);
      x = call ? call(one, x) : one->forward(x);
      if (twice) x = one->forward(x);
    }
    return torch::linear(norm(x), tokens->weight);
  }
  torch::nn::Embedding tokens{nullptr}, positions{nullptr};
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm{nullptr};
  bool twice = false;                                                      ///< Each block runs twice.
  bool swaps = false;                                                      ///< Blocks 1 and 2 change places.
  int throws_at = -1;                                                      ///< Block.
  std::function<at::Tensor(std::shared_ptr<BlockImpl>, at::Tensor)> call;  ///< How to run a block.
};
TORCH_MODULE(Gpt);

inline at::Tensor token_ids(int seed, int batch = 2, int length = 8, int vocabulary = 41) {
  torch::manual_seed(static_cast<std::uint64_t>(seed));
  return torch::randint(vocabulary, {batch, length});
}

inline at::Tensor loss_of(GptImpl& model, const at::Tensor& ids) {
  return torch::cross_entropy_loss(model.forward(ids).flatten(0, 1), ids.roll(1, 1).flatten());
}

}  // namespace ddpkit::testing
