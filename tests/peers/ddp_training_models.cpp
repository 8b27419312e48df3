#include "ddp_training.h"

namespace ddpkit::testing {
namespace {

namespace nn = torch::nn;

struct Mlp : PeerModel {
  Mlp() { register_module("layers", layers); }
  torch::Tensor forward(const torch::Tensor& x) override { return layers->forward(x); }
  nn::Sequential layers{nn::Linear(20, 64), nn::ReLU(), nn::Linear(64, 64), nn::ReLU(), nn::Linear(64, 5)};
};

struct Lstm : PeerModel {
  Lstm() {
    register_module("lstm", lstm);
    register_module("output", output);
  }
  torch::Tensor forward(const torch::Tensor& x) override {
    return output->forward(std::get<0>(lstm->forward(x)).select(1, -1));
  }
  nn::LSTM lstm{nn::LSTMOptions(6, 24).num_layers(2).batch_first(true)};
  nn::Linear output{24, 5};
};

/// The embedding is also the output's weight, so it receives gradients from both ends of the model.
struct Transformer : PeerModel {
  Transformer() {
    register_module("embedding", embedding);
    register_module("block", block);
    position = register_parameter("position", torch::zeros({10, 1, 32}));
  }
  torch::Tensor forward(const torch::Tensor& x) override {
    const torch::Tensor mask = nn::TransformerImpl::generate_square_subsequent_mask(10);
    const torch::Tensor y = block->forward(embedding->forward(x.t()) + position, mask);
    return torch::linear(y.transpose(0, 1), embedding->weight).flatten(0, 1);
  }
  nn::Embedding embedding{50, 32};
  nn::TransformerEncoderLayer block{nn::TransformerEncoderLayerOptions(32, 4).dim_feedforward(64).dropout(0)};
  torch::Tensor position;
};

/// Blocks of one size, whose weights would be mixed if they were gathered in another order.
struct Decoder : PeerModel {
  Decoder() {
    register_module("embedding", embedding);
    for (int i = 0; i < 3; ++i)
      blocks->push_back(
          nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(32, 4).dim_feedforward(64).dropout(0)));
    register_module("blocks", blocks);
    position = register_parameter("position", torch::zeros({10, 1, 32}));
  }
  torch::Tensor forward(const torch::Tensor& x) override {
    const torch::Tensor mask = nn::TransformerImpl::generate_square_subsequent_mask(10);
    torch::Tensor y = embedding->forward(x.t()) + position;
    for (const auto& block : *blocks) y = block->as<nn::TransformerEncoderLayer>()->forward(y, mask);
    return torch::linear(y.transpose(0, 1), embedding->weight).flatten(0, 1);
  }
  nn::Embedding embedding{50, 32};
  nn::ModuleList blocks;
  torch::Tensor position;
};

// Buckets so small that there are several.
const DistributedDataParallelOptions kSmallBuckets = {.bucket_cap_mb = 0.008, .first_bucket_cap_mb = 0.002};

[[maybe_unused]] const bool models_added = [] {
  peer_cases()["mlp"] = {make_peer_model<Mlp>, kSmallBuckets};
  peer_cases()["lstm"] = {make_peer_model<Lstm>, kSmallBuckets};
  peer_cases()["transformer"] = {make_peer_model<Transformer>, kSmallBuckets};
  peer_cases()["fsdp"] = {.make = make_peer_model<Decoder>, .fully_sharded = FullyShardedOptions{.min_unit_mb = 0}};
  peer_cases()["fsdp_whole"] = {.make = make_peer_model<Decoder>,
                                .fully_sharded = FullyShardedOptions{.min_unit_mb = 0, .reshard_after_forward = false}};
  return true;
}();

}  // namespace
}  // namespace ddpkit::testing
