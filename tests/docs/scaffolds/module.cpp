// Before the module is wrapped.
void run(ddpkit::ProcessGroup group) {
  torch::manual_seed(1 + group.rank());
  torch::nn::Sequential model(torch::nn::Linear(16, 32), torch::nn::BatchNorm1d(32), torch::nn::ReLU(),
                              torch::nn::Linear(32, 4));
  model->to(group.device());
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const torch::data::Example<> batch{torch::randn({8, 16}), torch::randint(4, {8}, torch::kLong)};
  {
    // The block.
  }
  for (const auto& parameter : model->parameters())
    ddpkit::docs::require(parameter.isfinite().all().item<bool>(), "the weights are finite");
  ddpkit::docs::require(batch.data.size(0) == batch.target.size(0) && optimizer.param_groups().size() == 1,
                        "the objects of the page exist");
}
