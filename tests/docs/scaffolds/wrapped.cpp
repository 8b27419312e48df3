// The module is wrapped, and has no optimizer yet.
void run(ddpkit::ProcessGroup group) {
  torch::manual_seed(1 + group.rank());
  torch::nn::Sequential model(torch::nn::Linear(16, 32), torch::nn::ReLU(), torch::nn::Linear(32, 4));
  model->to(group.device());
  ddpkit::DistributedDataParallel ddp(model, group);
  const auto weights = model->parameters()[0].detach().clone();
  {
    // The block.
    ddp(torch::randn({8, 16})).pow(2).mean().backward();
    optimizer.step();
  }
  ddpkit::docs::require(!torch::equal(weights, model->parameters()[0]), "the optimizer moves the weights");
}
