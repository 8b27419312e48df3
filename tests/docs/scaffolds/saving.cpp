// On rank 0, after a step: a model and its optimizer.
void run(ddpkit::ProcessGroup group) {
  torch::nn::Sequential model(torch::nn::Linear(16, 32), torch::nn::ReLU(), torch::nn::Linear(32, 4));
  ddpkit::optim::FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  model->forward(torch::randn({8, 16})).pow(2).mean().backward();
  optimizer.step();
  if (group.rank() != 0) return;
  {
    // The block.
  }
  ddpkit::docs::require(std::filesystem::exists("run.pt"), "the file is there");
}
