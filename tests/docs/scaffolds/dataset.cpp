// A data set, and a function that trains on its batches.
struct Points : torch::data::Dataset<Points> {
  torch::data::Example<> get(size_t index) override {
    return {torch::full({2}, static_cast<double>(index)), torch::tensor(static_cast<int64_t>(index % 3))};
  }
  std::optional<size_t> size() const override { return 128; }
};

void run(ddpkit::ProcessGroup group) {
  auto train = Points().map(torch::data::transforms::Stack<>());
  ddpkit::DistributedSampler sampler(train.size().value(), group);
  std::int64_t trained = 0;
  const auto train_on = [&](const torch::data::Example<>& batch) { trained += batch.data.size(0); };
  {
    // The block.
  }
  ddpkit::docs::require(trained > 0 && trained % static_cast<std::int64_t>(sampler.num_samples()) == 0,
                        "whole epochs were seen");
}
