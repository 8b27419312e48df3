// Within a training: all objects exist.
void run(ddpkit::ProcessGroup group) {
  torch::manual_seed(1 + group.rank());
  const torch::Device device = group.device();
  torch::nn::Sequential model(torch::nn::Linear(16, 32), torch::nn::ReLU(), torch::nn::Linear(32, 4));
  model->to(device);
  ddpkit::DistributedDataParallel ddp(model, group);
  ddpkit::optim::FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  ddpkit::DistributedSampler sampler(64, group);
  const torch::data::Example<> batch{torch::randn({8, 16}), torch::randint(4, {8}, torch::kLong)};
  const std::vector<torch::data::Example<>> batches(20, batch);
  const auto* loader = &batches;
  const auto dtype = torch::kBFloat16;
  torch::Tensor loss;
  const auto train_step = [&] {
    optimizer.zero_grad();
    torch::cross_entropy_loss(ddp(batch.data), batch.target).backward();
    optimizer.step();
  };
  train_step();
  const auto weights = model->parameters()[0].detach().clone();
  {
    // The block.
  }
  train_step();  // After the block, the training continues, equal on all ranks.
  const auto all = group.all_gather(model->parameters()[0].detach());
  for (int rank = 1; rank < group.world_size(); ++rank)
    ddpkit::docs::require(torch::equal(all[0], all[rank]), "the ranks have the same weights");
  ddpkit::docs::require(!torch::equal(weights, all[0]), "the weights move");
}
