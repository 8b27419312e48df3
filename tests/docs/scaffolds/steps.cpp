// A loop with batches from batch(number). Each rank has a different number of batches.
void run(ddpkit::ProcessGroup group) {
  torch::manual_seed(1 + group.rank());
  torch::nn::Sequential model(torch::nn::Linear(16, 32), torch::nn::ReLU(), torch::nn::Linear(32, 4));
  model->to(group.device());
  ddpkit::DistributedDataParallel ddp(model, group);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const auto batch = [&](int) { return torch::randn({8, 16}, group.device()); };
  const int steps_of_this_rank = 2 + group.rank();
  const auto weights = model->parameters()[0].detach().clone();
  {
    // The block.
  }
  ddpkit::docs::require(steps_of_this_rank > 0 && !torch::equal(weights, model->parameters()[0]), "the weights move");
  const auto all = group.all_gather(model->parameters()[0].detach());
  for (int rank = 1; rank < group.world_size(); ++rank)
    ddpkit::docs::require(torch::equal(all[0], all[rank]), "the ranks have the same weights");
}
