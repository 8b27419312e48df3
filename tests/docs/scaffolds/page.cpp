// The module and the data that the page's program requires.
#include <torch/torch.h>

struct Net : torch::nn::Module {
  Net() : linear(register_module("linear", torch::nn::Linear(2, 3))) {}
  torch::Tensor forward(const torch::Tensor& x) { return linear(x); }
  torch::nn::Linear linear;
};

struct Points : torch::data::Dataset<Points> {
  torch::data::Example<> get(size_t index) override {
    return {torch::full({2}, static_cast<double>(index) / 192), torch::tensor(static_cast<int64_t>(index / 64))};
  }
  std::optional<size_t> size() const override { return 192; }
};

static auto train = Points().map(torch::data::transforms::Stack<>());
