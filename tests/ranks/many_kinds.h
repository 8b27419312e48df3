// A model of many kinds of layers, and its training by one process on the batches of all ranks.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

#include "ranks/comparisons.h"

namespace ddpkit::testing {

constexpr std::int64_t kBatch = 12;  // A multiple of 2, 3 and 4 ranks.

/// Encoder and decoder are one parameter under two names.
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    encoder = register_parameter("encoder", torch::randn({6, 5}));
    decoder = register_parameter("decoder", encoder);
    bias = register_parameter("bias", torch::zeros({6}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::tanh(x.matmul(encoder)).matmul(decoder.t()) + bias; }
  torch::Tensor encoder, decoder, bias;
};
TORCH_MODULE(Tied);

/// A convolution, batch norm in eval mode, an LSTM and tied weights, in double.
struct ManyKindsImpl : torch::nn::Module {
  explicit ManyKindsImpl(std::uint64_t seed) {
    torch::manual_seed(seed);
    convolution = register_module("convolution", torch::nn::Conv1d(3, 8, 3));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(8, 6).batch_first(true)));
    tied = register_module("tied", Tied());
    head = register_module("head", torch::nn::Linear(6, 4));
    norm->running_mean.normal_();
    norm->eval();
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto features = torch::relu(norm(convolution(x))).transpose(1, 2);
    const auto sequence = std::get<0>(lstm(features));
    return head(tied(sequence.select(1, -1)));
  }
  torch::nn::Conv1d convolution{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::LSTM lstm{nullptr};
  Tied tied{nullptr};
  torch::nn::Linear head{nullptr};
};

inline std::shared_ptr<ManyKindsImpl> many_kinds(std::uint64_t seed) {
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  auto model = std::make_shared<ManyKindsImpl>(seed);
  torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
  return model;
}

struct Batch {
  torch::Tensor data, target;
  Batch part(int rank, int ranks) const {
    return {data.chunk(ranks)[static_cast<std::size_t>(rank)], target.chunk(ranks)[static_cast<std::size_t>(rank)]};
  }
};

inline Batch joined_batch(std::int64_t step) {
  torch::manual_seed(static_cast<std::uint64_t>(10000 + step));
  return {torch::randn({kBatch, 3, 9}, torch::kDouble), torch::randint(0, 4, {kBatch})};
}

inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                               std::vector<torch::Tensor> parameters) {
  if (name == "sgd")
    return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
  if (name == "adam") return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(1e-2));
  return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-2));
}

inline torch::Tensor loss_of(const torch::Tensor& output, const Batch& batch) {
  return torch::cross_entropy_loss(output, batch.target);
}

/// Trains `steps` steps on the joined batches in one process.
inline void train_alone(ManyKindsImpl& model, const std::string& optimizer_name, int steps) {
  auto optimizer = make_optimizer(optimizer_name, unique_parameters(model));
  for (int step = 0; step < steps; ++step) {
    const Batch batch = joined_batch(step);
    optimizer->zero_grad();
    loss_of(model.forward(batch.data), batch).backward();
    optimizer->step();
  }
}

/// Trains `steps` steps on this rank's parts of the joined batches.
inline void train_on_ranks(DistributedDataParallel<ManyKindsImpl>& ddp, const ProcessGroup& group,
                           const std::string& optimizer_name, int steps) {
  auto optimizer = make_optimizer(optimizer_name, unique_parameters(ddp.module()));
  for (int step = 0; step < steps; ++step) {
    const Batch batch = joined_batch(step).part(group.rank(), group.world_size());
    optimizer->zero_grad();
    loss_of(ddp(batch.data), batch).backward();
    optimizer->step();
  }
}

}  // namespace ddpkit::testing
