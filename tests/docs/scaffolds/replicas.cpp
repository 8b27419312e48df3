// A module in DataParallel.
void run(ddpkit::ProcessGroup) {
  torch::nn::Sequential model(torch::nn::Linear(16, 32), torch::nn::ReLU(), torch::nn::Linear(32, 4));
  ddpkit::DataParallel dp(model, {.replicas = 2});
  const torch::data::Example<> batch{torch::randn({8, 16}), torch::randint(4, {8}, torch::kLong)};
  {
    // The block.
  }
  for (const auto& parameter : model->parameters())
    ddpkit::docs::require(parameter.grad().defined(), "the module has gradients");
}
