// Models for the tests of FullyShardedDataParallel, and their training in one process that plays all ranks.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ddpkit/parallel/activation_checkpoint.h>
#include <ddpkit/parallel/fully_sharded_data_parallel.h>

#include "support/transformer.h"

namespace ddpkit::testing {

/// forward() returns the loss.
struct LossModel : torch::nn::Module {
  virtual at::Tensor forward(const at::Tensor& x) = 0;
  virtual at::Tensor input(std::int64_t step, int rank, at::ScalarType dtype) const {
    torch::manual_seed(static_cast<std::uint64_t>(1000 * step + rank));
    return torch::randn({4, 1, 6, 7}, at::TensorOptions(dtype));
  }
};

struct Mlp final : LossModel {
  Mlp() {
    torch::manual_seed(3);
    layers = register_module(
        "layers", torch::nn::Sequential(torch::nn::Linear(42, 37), torch::nn::Tanh(), torch::nn::Linear(37, 29),
                                        torch::nn::Tanh(), torch::nn::Linear(29, 5)));
  }
  at::Tensor forward(const at::Tensor& x) override { return (layers->forward(x.flatten(1)) - 1).pow(2).mean(); }
  torch::nn::Sequential layers{nullptr};
};

struct Cnn final : LossModel {
  Cnn() {
    torch::manual_seed(3);
    layers = register_module(
        "layers", torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 5, 3).padding(1).bias(false)),
                                        torch::nn::BatchNorm2d(5), torch::nn::ReLU(),
                                        torch::nn::Conv2d(torch::nn::Conv2dOptions(5, 3, 3).padding(1)),
                                        torch::nn::BatchNorm2d(3), torch::nn::PReLU()));
    head = register_module("head", torch::nn::Linear(3 * 42, 4));
  }
  at::Tensor forward(const at::Tensor& x) override { return (head(layers->forward(x).flatten(1)) - 1).pow(2).mean(); }
  torch::nn::Sequential layers{nullptr};
  torch::nn::Linear head{nullptr};
};

struct Recurrent final : LossModel {
  Recurrent() {
    torch::manual_seed(3);
    parts = register_module("parts", torch::nn::ModuleList());
    parts->push_back(torch::nn::LSTM(torch::nn::LSTMOptions(7, 9).num_layers(2).bidirectional(true)));
    parts->push_back(torch::nn::GRU(18, 6));
    head = register_module("head", torch::nn::Linear(6, 3));
  }
  at::Tensor forward(const at::Tensor& x) override {
    const auto sequence = std::get<0>(parts[0]->as<torch::nn::LSTM>()->forward(x.squeeze(1).transpose(0, 1)));
    return (head(std::get<0>(parts[1]->as<torch::nn::GRU>()->forward(sequence))) - 1).pow(2).mean();
  }
  torch::nn::ModuleList parts;
  torch::nn::Linear head{nullptr};
};

struct Transformer final : LossModel {
  Transformer() : gpt(register_module("gpt", Gpt(0, 16, 4))) {}
  at::Tensor forward(const at::Tensor& ids) override { return loss_of(*gpt, ids); }
  at::Tensor input(std::int64_t step, int rank, at::ScalarType) const override {
    return token_ids(static_cast<int>(100 * step + rank));
  }
  void checkpoint() {
    gpt->call = [](const std::shared_ptr<BlockImpl>& block, const at::Tensor& x) {
      return activation_checkpoint([block](const at::Tensor& y) { return block->forward(y); }, x);
    };
  }
  Gpt gpt;
};

using MakeModel = std::function<std::shared_ptr<LossModel>()>;

template <class M>
MakeModel maker(at::ScalarType dtype, std::function<void(M&)> change = {}) {
  return [=] {
    const auto model = std::make_shared<M>();
    model->to(dtype);
    if (change) change(*model);
    return model;
  };
}

/// Adds the gradients that DistributedDataParallel on `ranks` ranks would average. Returns the loss of `rank`. Buffers
/// end as those of rank 0.
inline double backward_alone(LossModel& model, std::int64_t step, int ranks, int rank, at::ScalarType dtype) {
  const auto values = [&] {
    std::vector<at::Tensor> copies;
    for (const auto& buffer : model.buffers()) copies.push_back(buffer.clone());
    return copies;
  };
  const auto restore = [&](const std::vector<at::Tensor>& from) {
    for (std::size_t i = 0; i < from.size(); ++i) model.buffers()[i].copy_(from[i]);
  };
  const auto before = values();
  std::vector<at::Tensor> after;
  double own = 0;
  for (int r = 0; r < ranks; ++r) {
    const at::Tensor loss = model.forward(model.input(step, r, dtype).to(model.parameters()[0].device()));
    (loss / ranks).backward();
    if (r == rank) own = loss.item<double>();
    if (r == 0) after = values();
    restore(before);
  }
  restore(after);
  return own;
}

}  // namespace ddpkit::testing
