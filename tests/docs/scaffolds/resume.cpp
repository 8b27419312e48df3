// A training that is killed within an epoch and resumed has the same result as an uninterrupted training.
struct Numbers : torch::data::Dataset<Numbers> {
  torch::data::Example<> get(size_t index) override {
    const auto number = torch::tensor(static_cast<int64_t>(index));
    return {number, number};
  }
  std::optional<size_t> size() const override { return 64; }
};

struct Counts : torch::nn::Module {
  torch::Tensor weight = register_parameter("weight", torch::zeros({1}));
  torch::Tensor seen = register_buffer("seen", torch::zeros({64}));  // Trainings on each sample.
  torch::Tensor drawn = register_buffer("drawn", torch::zeros({1}));
};

std::shared_ptr<Counts> train_in(ddpkit::ProcessGroup group, const std::string& folder, int steps) {
  struct Killed {};
  const auto model = std::make_shared<Counts>();
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const auto train = Numbers().map(torch::data::transforms::Stack<>());
  const auto train_on = [&](const torch::data::Example<>& batch) {
    if (steps-- == 0) throw Killed();
    model->seen.index_add_(0, batch.data, torch::ones({batch.data.size(0)}));
    model->drawn += torch::rand({1});
  };
  try {
    // The block.
  } catch (const Killed&) {
    return nullptr;
  }
  return model;
}

void run(ddpkit::ProcessGroup group) {
  torch::manual_seed(5);
  const auto whole = train_in(group, "runs/whole", 1000);
  ddpkit::docs::require(train_in(group, "runs/killed", 11) == nullptr, "the training was killed");
  torch::manual_seed(6);
  const auto resumed = train_in(group, "runs/killed", 1000);
  ddpkit::docs::require(torch::equal(whole->seen, resumed->seen), "each sample was used as often");
  ddpkit::docs::require(torch::equal(whole->drawn, resumed->drawn), "the generators resume");
  group.all_reduce(resumed->seen);
  ddpkit::docs::require(resumed->seen.eq(2).all().item<bool>(), "each epoch had all samples");
}
