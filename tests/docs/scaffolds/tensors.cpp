// A model of two tensors, and batches from batch(number). Each rank has other batches.
void run(ddpkit::ProcessGroup group) {
  torch::manual_seed(0);
  const auto weight = torch::randn({16, 4}, group.device()).requires_grad_(true);
  const auto bias = torch::zeros({4}, group.device()).requires_grad_(true);
  torch::manual_seed(1 + group.rank());
  const auto batch = [&](int) { return torch::randn({8, 16}, group.device()); };
  const auto before = weight.detach().clone();
  {
    // The block.
  }
  ddpkit::docs::require(!torch::equal(before, weight), "the weights move");
  for (const auto& tensor : {weight.detach(), bias.detach(), weight.grad(), bias.grad()}) {
    const auto all = group.all_gather(tensor);
    for (int rank = 1; rank < group.world_size(); ++rank)
      ddpkit::docs::require(torch::equal(all[0], all[rank]), "the ranks have the same weights and gradients");
  }
}
