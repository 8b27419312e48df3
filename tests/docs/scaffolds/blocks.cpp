// Before a model of blocks is wrapped. The block may take its weights.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 3; ++i) blocks->push_back(torch::nn::Linear(16, 16));
    register_module("blocks", blocks);
    head = register_module("head", torch::nn::Linear(16, 4));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& block : *blocks) x = torch::relu(block->as<torch::nn::Linear>()->forward(x));
    return head(x);
  }
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

void run(ddpkit::ProcessGroup group) {
  Net model;
  const torch::data::Example<> batch{torch::randn({8, 16}), torch::randint(4, {8}, torch::kLong)};
  {
    // The block.
  }
  ddpkit::docs::require(batch.data.size(0) == batch.target.size(0) && group.world_size() == 2,
                        "the objects of the page exist");
}
