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
#include "support/transformer.h"

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
      if (next_scattered_ == 0) scattered_.push_back(all.back());
      for (std::size_t i = 0; i < values[b].size(); ++i)
        all.back().narrow(0, blocks[b].layout.offsets[i], blocks[b].layout.numels[i]).copy_(values[b][i].reshape({-1}));
    }
  }

  /// The model has the same values on all ranks.
  void scatter(const at::Tensor& shard, const at::Tensor&) override {
    const at::Tensor& flat = scattered_.at(next_scattered_++);
    shard.copy_(flat.narrow(0, rank_ * shard.numel(), shard.numel()));
  }

  Agreement agree(const Tag& tag) override {
    used.push_back(tag.unit);
    wanted.push_back(tag.wanted);
    Agreement agreement{.wanted = tag.wanted.size(), .reductions = tag.reductions};
    if (others_expect_other) agreement.wanted = tag.wanted[0] == tag.unit ? 1 : 0;
    return agreement;
  }

  /// The memory is garbage until the end of the gather.
  std::function<void()> start_gather(std::size_t unit, const std::vector<at::Tensor>& flats,
                                     const std::vector<at::Tensor>& shards) override {
    ++gathers;
    if (std::exchange(fails_next, false)) throw std::runtime_error("the gather failed");
    for (const at::Tensor& flat : flats) flat.fill_(99);
    ++in_flight;
    if (unit != used.back()) ++ahead;
    return [this, unit, flats, shards] {
      --in_flight;
      if (std::exchange(fails_to_end, false)) throw std::runtime_error("the gather did not end");
      for (std::size_t b = 0; b < flats.size(); ++b) {
        flats[b].copy_(whole_.at(unit)[b]);
        flats[b].narrow(0, rank_ * shards[b].numel(), shards[b].numel()).copy_(shards[b]);
      }
    };
  }
  void abort(const std::string&) noexcept override {}

  int gathers = 0, in_flight = 0;
  int ahead = 0;  ///< Gathers of other units than the one in use.
  bool fails_next = false, fails_to_end = false;
  bool others_expect_other = false;              ///< The other ranks expect other units.
  std::vector<std::size_t> used;                 ///< By each call of agree().
  std::vector<std::vector<std::size_t>> wanted;  ///< By each call of agree().

 private:
  int rank_, ranks_;
  std::map<std::size_t, std::vector<at::Tensor>> whole_;  ///< [unit][block]
  std::vector<at::Tensor> scattered_;                     ///< In the order of the calls of scatter().
  std::size_t next_scattered_ = 0;
};

/// Parameters in contiguous order only.
class ShardedModel {
 public:
  struct Options {
    int ranks = 2;
    std::size_t window = 2, prefetch = 0;
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
    shards = std::make_unique<ParameterShards>(units, std::move(transport), options.window, options.prefetch);
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
  /// Trains one step, as FullyShardedDataParallel does.
  void train(const std::function<void()>& step) {
    ranks->gathers = 0;
    ranks->used.clear();
    ranks->wanted.clear();
    shards->begin_pass();
    step();
  }
  /// Releases all units, as an optimizer's step does.
  void release() { shards->before_update(); }

  std::vector<ShardedUnit> units;
  SimulatedRanks* ranks = nullptr;
  std::unique_ptr<ParameterShards> shards;
};

}  // namespace ddpkit::testing
