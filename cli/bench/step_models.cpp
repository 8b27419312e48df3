#include "step_models.h"

#include <torch/torch.h>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_sgd.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/parallel/activation_checkpoint.h>

#include "step_plan.h"

namespace ddpkit::bench {
namespace {

constexpr std::int64_t kClasses = 6;

/// Human activities from 561 features, as in the example `har`.
class Mlp : public StepModel {
 public:
  static constexpr std::int64_t kInputs = 561;

  explicit Mlp(const MlpShape& shape) {
    std::int64_t inputs = kInputs;
    for (int layer = 0; layer < shape.layers; ++layer) {
      layers_->push_back(torch::nn::Linear(inputs, shape.hidden));
      layers_->push_back(torch::nn::ReLU());
      inputs = shape.hidden;
    }
    layers_->push_back(torch::nn::Linear(inputs, kClasses));
    register_module("layers", layers_);
  }
  at::Tensor forward(const at::Tensor& input) override { return layers_->forward(input); }

 private:
  torch::nn::Sequential layers_;
};

/// Images of 3 x 32 x 32. Batch norm adds buffers to broadcast.
class Cnn : public StepModel {
 public:
  Cnn() {
    std::int64_t channels = 3;
    for (const std::int64_t next : {16, 32, 64}) {
      layers_->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(channels, next, 3).padding(1).bias(false)));
      layers_->push_back(torch::nn::BatchNorm2d(next));
      layers_->push_back(torch::nn::ReLU());
      layers_->push_back(torch::nn::MaxPool2d(2));
      channels = next;
    }
    layers_->push_back(torch::nn::Flatten());
    layers_->push_back(torch::nn::Linear(channels * 4 * 4, kClasses));
    register_module("layers", layers_);
  }
  at::Tensor forward(const at::Tensor& input) override { return layers_->forward(input); }

 private:
  torch::nn::Sequential layers_;
};

/// 128 readings of 9 motion sensors.
class Lstm : public StepModel {
 public:
  Lstm() {
    register_module("lstm", lstm_);
    register_module("output", output_);
  }
  at::Tensor forward(const at::Tensor& input) override {
    return output_->forward(std::get<0>(lstm_->forward(input)).select(1, -1));
  }

 private:
  torch::nn::LSTM lstm_{torch::nn::LSTMOptions(9, 100).num_layers(2).batch_first(true)};
  torch::nn::Linear output_{100, kClasses};
};

/// Predicts the next of 1,000 tokens for each of 32 tokens, with `width` / 32 heads. The output weights are tied to the
/// embedding.
class Transformer : public StepModel {
 public:
  using StepModel::to;
  static constexpr std::int64_t kTokens = 1000, kLength = 32;

  Transformer(std::int64_t width, int layers, bool checkpoint) : embedding_(kTokens, width), checkpoint_(checkpoint) {
    register_module("embedding", embedding_);
    // As in GPT-2. LibTorch's default deviation of 1 makes the softmax of the tied output too sharp: in the twentieth
    // step, 46 % of its gradient are subnormal numbers. Some processors take several times as long for subnormal
    // numbers.
    torch::nn::init::normal_(embedding_->weight, 0, 0.02);
    position_ = register_parameter("position", 0.02 * torch::randn({kLength, 1, width}));
    for (int layer = 0; layer < layers; ++layer) {
      layers_->push_back(torch::nn::TransformerEncoderLayer(
          torch::nn::TransformerEncoderLayerOptions(width, width / 32).dim_feedforward(4 * width).dropout(0)));
    }
    register_module("layers", layers_);
    mask_ = torch::nn::TransformerImpl::generate_square_subsequent_mask(kLength);
  }
  at::Tensor forward(const at::Tensor& input) override {
    at::Tensor x = embedding_->forward(input.t()) + position_;
    for (const auto& layer : *layers_) {
      const auto forward = [layer](const at::Tensor& in, const at::Tensor& mask) {
        return layer->as<torch::nn::TransformerEncoderLayer>()->forward(in, mask);
      };
      x = checkpoint_ ? activation_checkpoint(forward, x, mask_) : forward(x, mask_);
    }
    return torch::linear(x, embedding_->weight).flatten(0, 1);
  }
  void to(torch::Device device, bool non_blocking = false) override {
    StepModel::to(device, non_blocking);
    mask_ = mask_.to(device);
  }

 private:
  torch::nn::Embedding embedding_;
  at::Tensor position_;
  torch::nn::ModuleList layers_;
  bool checkpoint_;
  at::Tensor mask_;  // Not a buffer, because DistributedDataParallel broadcasts buffers.
};

const torch::optim::SGDOptions kSgd(1e-3);
const torch::optim::AdamWOptions kAdamW(1e-4);

template <class Optimizer>
StepOptimizer as_step_optimizer(std::shared_ptr<Optimizer> optimizer) {
  return {.zero_grad = [optimizer] { optimizer->zero_grad(); }, .step = [optimizer] { optimizer->step(); }};
}

template <class Optimizer, class Options>
StepOptimizer fused_step_optimizer(std::vector<at::Tensor> parameters, const Options& options, bool capturable) {
  const auto optimizer =
      std::make_shared<Optimizer>(std::move(parameters), options, optim::FusedOptions{.capturable = capturable});
  StepOptimizer step = as_step_optimizer(optimizer);
  if (capturable) step.capturable = optimizer.get();
  return step;
}

}  // namespace

StepTask make_step_task(const std::string& model, std::int64_t batch, int rank, c10::Device device, bool checkpoint) {
  torch::manual_seed(1);
  StepTask task;
  const auto data_seed = [rank] { torch::manual_seed(static_cast<std::uint64_t>(2 + rank)); };
  const auto classes = [&] { task.target = torch::randint(kClasses, {batch}, at::kLong); };
  if (const auto shape = mlp_shape(model)) {
    task.model = std::make_shared<Mlp>(*shape);
    data_seed();
    task.input = torch::randn({batch, Mlp::kInputs});
    classes();
  } else if (model == "cnn") {
    task.model = std::make_shared<Cnn>();
    data_seed();
    task.input = torch::randn({batch, 3, 32, 32});
    classes();
  } else if (model == "lstm") {
    task.model = std::make_shared<Lstm>();
    data_seed();
    task.input = torch::randn({batch, 128, 9});
    classes();
  } else {
    const bool is_small = model == "transformer";
    task.model = std::make_shared<Transformer>(is_small ? 128 : 512, is_small ? 2 : 8, checkpoint);
    data_seed();
    const at::Tensor text = torch::randint(Transformer::kTokens, {batch, Transformer::kLength + 1}, at::kLong);
    task.input = text.narrow(1, 0, Transformer::kLength);
    task.target = text.narrow(1, 1, Transformer::kLength).t().flatten();
  }
  task.model->to(device);
  task.input = task.input.to(device);
  task.target = task.target.to(device);
  return task;
}

StepOptimizer make_step_optimizer(const std::string& name, const std::string& update,
                                  std::vector<at::Tensor> parameters) {
  const bool fused = update != kTorchUpdate, capturable = update == kGraphedUpdate;
  if (name == "sgd") {
    if (fused) return fused_step_optimizer<optim::FusedSGD>(std::move(parameters), kSgd, capturable);
    return as_step_optimizer(std::make_shared<torch::optim::SGD>(std::move(parameters), kSgd));
  }
  if (name == "adamw") {
    if (fused) return fused_step_optimizer<optim::FusedAdamW>(std::move(parameters), kAdamW, capturable);
    return as_step_optimizer(std::make_shared<torch::optim::AdamW>(std::move(parameters), kAdamW));
  }
  throw InvalidArgument(fmt::format("there is no optimizer \"{}\"; there are sgd, adamw", name));
}

StepOptimizer make_sharded_step_optimizer(const std::string& name, const std::string& update,
                                          DistributedDataParallelBase& ddp) {
  const optim::ShardedOptions options{.shared_weights = ddp.group().backend_name() == "shm" && update != kFsdpUpdate,
                                      .update_in_backward = update == kInBackwardUpdate};
  if (name == "sgd")
    return as_step_optimizer(std::make_shared<optim::ShardedOptimizer<optim::FusedSGD>>(ddp, kSgd, options));
  return as_step_optimizer(std::make_shared<optim::ShardedOptimizer<optim::FusedAdamW>>(ddp, kAdamW, options));
}

}  // namespace ddpkit::bench
