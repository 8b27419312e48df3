// A complete training loop. Runs alone or under `ddpkit run -n N`.
#include <torch/torch.h>

#include <ddpkit/ddpkit.h>

#include <iostream>
#include <string>

struct Net : torch::nn::Module {
  Net() {
    hidden = register_module("hidden", torch::nn::Linear(2, 32));
    output = register_module("output", torch::nn::Linear(32, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) { return output(torch::relu(hidden(x))); }
  torch::nn::Linear hidden{nullptr}, output{nullptr};
};

/// Points of three interleaved spirals in the plane.
struct Spirals : torch::data::Dataset<Spirals> {
  torch::data::Example<> get(size_t index) override {
    const auto arm = static_cast<int64_t>(index % 3);
    const double t = static_cast<double>(index / 3) / 256, angle = 4 * t + 2.1 * static_cast<double>(arm);
    return {torch::tensor({t * std::sin(angle), t * std::cos(angle)}, torch::kFloat), torch::tensor(arm)};
  }
  std::optional<size_t> size() const override { return 768; }
};

int main() try {
  auto group = ddpkit::init_process_group();  // from the launcher's environment; a world of one rank without a launcher
  auto model = std::make_shared<Net>();
  model->to(group.device());
  ddpkit::DistributedDataParallel ddp(model, group);  // broadcasts weights and buffers, hooks the gradients
  auto train = Spirals().map(torch::data::transforms::Stack<>());
  ddpkit::DistributedSampler sampler(train.size().value(), group);
  auto loader = torch::data::make_data_loader(train, sampler, 32);
  torch::optim::AdamW optimizer(model->parameters(), 1e-2);
  for (int epoch = 0; epoch < 20; ++epoch) {
    sampler.set_epoch(epoch);
    auto losses = torch::zeros({2}, group.device());  // sum, count
    for (auto& batch : *loader) {
      optimizer.zero_grad();
      auto loss = torch::cross_entropy_loss(ddp(batch.data.to(group.device())), batch.target.to(group.device()));
      loss.backward();  // runs all-reduce bucket by bucket during backward
      optimizer.step();
      losses += torch::stack({loss.detach(), torch::ones_like(loss)});
    }
    group.all_reduce(losses);
    if (group.rank() == 0)
      std::cout << "epoch " << epoch + 1 << "  loss " << (losses[0] / losses[1]).item<float>() << std::endl;
  }
} catch (const std::exception& error) {
  std::cerr << std::string("custom_loop: ") + error.what() + "\n";  // One write, as other ranks write too.
  return 1;
}
