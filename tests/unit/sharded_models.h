// A model whose parameters are sharded over simulated ranks: this process is one of them.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "parallel/sharding/parameter_shards.h"
#include "parallel/sharding/unit_plan.h"

namespace ddpkit::testing {

/// The other ranks keep the weights that the model had when it was sharded, or those of the last learn().
class SimulatedRanks final : public ShardTransport {
 public:
  SimulatedRanks(int rank, int ranks) : rank_(rank), ranks_(ranks) {}
  int rank() const override { return rank_; }
  int world_size() const override { return ranks_; }

  void learn(std::size_t unit, const std::vector<ShardedBlock>& blocks,
             const std::vector<std::vector<at::Tensor>>& values) {
    const at::NoGradGuard no_grad;
    auto& all = whole_[unit];
    all.clear();
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      all.push_back(torch::zeros({blocks[b].layout.numel}, values[b][0].options().requires_grad(false)));
      for (std::size_t i = 0; i < values[b].size(); ++i)
        all.back().narrow(0, blocks[b].layout.offsets[i], blocks[b].layout.numels[i]).copy_(values[b][i].reshape({-1}));
    }
  }

  void gather(const Tag& tag, const std::vector<at::Tensor>& flats, const std::vector<at::Tensor>& shards) override {
    ++gathers;
    if (std::exchange(fails_next, false)) throw std::runtime_error("the gather failed");
    for (std::size_t b = 0; b < flats.size(); ++b) {
      flats[b].copy_(whole_.at(tag.unit)[b]);
      flats[b].narrow(0, rank_ * shards[b].numel(), shards[b].numel()).copy_(shards[b]);
    }
  }
  void abort(const std::string&) noexcept override {}

  int gathers = 0;
  bool fails_next = false;

 private:
  int rank_, ranks_;
  std::map<std::size_t, std::vector<at::Tensor>> whole_;  ///< [unit][block]
};

/// Parameters in contiguous order only.
class ShardedModel {
 public:
  struct Options {
    int ranks = 2;
    std::size_t window = 2;
    bool keeps_root = true;
    int rank = 0;
    std::vector<std::string> units = {};
    bool scope = true;  ///< The parameters can be used anywhere.
  };

  ShardedModel(const torch::nn::Module& module, const Options& options)
      : ShardedModel(plan_units(module, options.units, 0), options) {}

  ShardedModel(std::vector<UnitPlan> plans, const Options& options) {
    auto transport = std::make_unique<SimulatedRanks>(options.rank, options.ranks);
    ranks = transport.get();
    for (UnitPlan& plan : plans) {
      ShardedUnit unit{.name = plan.name, .blocks = {}, .stays_whole = plan.is_root && options.keeps_root};
      std::vector<ParameterInfo> infos;
      for (const auto& parameter : plan.parameters)
        infos.push_back(
            {.numel = static_cast<std::size_t>(parameter.tensor.numel()), .dtype = parameter.tensor.scalar_type()});
      for (const auto& members : plan_buckets(infos, SIZE_MAX, SIZE_MAX)) {
        ShardedBlock block;
        std::vector<std::int64_t> numels;
        for (const std::size_t i : members) {
          block.parameters.push_back(plan.parameters[i]);
          numels.push_back(plan.parameters[i].tensor.numel());
        }
        block.layout = make_flat_layout(std::move(numels), block.parameters[0].tensor.element_size(), options.ranks);
        unit.blocks.push_back(std::move(block));
      }
      units.push_back(std::move(unit));
    }
    learn([](const at::Tensor& parameter) { return parameter.detach(); });
    shards = std::make_unique<ParameterShards>(units, std::move(transport), options.window);
    if (options.scope) shards->enter();
  }

  /// The other ranks now have the values that `values_of` returns for each parameter.
  void learn(const std::function<at::Tensor(const at::Tensor&)>& values_of) {
    for (std::size_t u = 0; u < units.size(); ++u) {
      std::vector<std::vector<at::Tensor>> values;
      for (const ShardedBlock& block : units[u].blocks) {
        values.emplace_back();
        for (const auto& parameter : block.parameters) values.back().push_back(values_of(parameter.tensor));
      }
      ranks->learn(u, units[u].blocks, values);
    }
  }
  /// Releases all units, as an optimizer's step does.
  void release() { shards->before_update(); }

  std::vector<ShardedUnit> units;
  SimulatedRanks* ranks = nullptr;
  std::unique_ptr<ParameterShards> shards;
};

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
    auto x = tokens(ids) + positions(torch::arange(ids.size(1)));
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
