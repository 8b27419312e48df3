// What DataParallel can scatter to replicas and gather from replicas: tensors in tuples, containers and custom types.
#include <torch/torch.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ddpkit/parallel/data_parallel.h>

#include "support/catch.h"
#include "unit/data_parallel_net.h"

using namespace ddpkit::testing;
using ddpkit::DataParallel;
using torch::Tensor;

namespace {

struct Pair {
  Tensor left;
  Tensor right;
  int number = 0;
};
Pair map_tensors(const Pair& pair, const ddpkit::TensorMap& map) {
  return {map(pair.left), map(pair.right), pair.number};
}

/// Takes and returns all supported nested types.
struct NestedImpl : torch::nn::Cloneable<NestedImpl> {
  using Outputs = std::tuple<Tensor, std::map<std::string, Tensor>, std::vector<Tensor>, std::optional<Tensor>, Pair>;
  NestedImpl() { reset(); }  // NOLINT(clang-analyzer-optin.cplusplus.VirtualCall)
  void reset() override { weight = register_parameter("weight", torch::ones({}, torch::kDouble)); }
  Outputs forward(const std::tuple<Tensor, std::vector<Tensor>>& many, const std::map<std::string, Tensor>& named,
                  const Pair& pair, double factor, const std::string& name, const Tensor& scale,
                  const std::optional<Tensor>& none) {
    const Tensor a = std::get<0>(many) * weight * factor * scale;
    const Tensor b = std::get<1>(many)[0] + std::get<1>(many)[1];
    return {a, {{"x", named.at(name) * weight}}, {b, a.sum()}, none, {pair.left + 1, pair.right * weight, 7}};
  }
  Tensor weight;
};
TORCH_MODULE(Nested);

}  // namespace

TEST_CASE("DataParallel scatters and gathers nested tensors", "[dp]") {
  Nested reference;
  Nested net;
  DataParallel dp(net, {.replicas = 2});
  const auto column = [](double begin) { return torch::arange(begin, begin + 5, torch::kDouble); };
  const auto call = [&](auto&& forward) {
    return forward(std::make_tuple(column(0), std::vector<Tensor>{column(10), column(20)}),
                   std::map<std::string, Tensor>{{"k", column(30)}}, Pair{column(40), column(50), 3}, 2.0, "k",
                   torch::tensor(3.0, torch::kDouble), std::optional<Tensor>());
  };
  const auto wanted = call([&](const auto&... args) { return reference->forward(args...); });
  const auto outputs = call([&](const auto&... args) { return dp(args...); });
  CHECK(torch::equal(std::get<0>(outputs), std::get<0>(wanted)));
  CHECK(torch::equal(std::get<1>(outputs).at("x"), std::get<1>(wanted).at("x")));
  CHECK(torch::equal(std::get<2>(outputs)[0], std::get<2>(wanted)[0]));
  CHECK(std::get<2>(outputs)[1].sizes() == at::IntArrayRef({2}));  // One scalar per replica.
  CHECK(torch::equal(std::get<2>(outputs)[1].sum(), std::get<2>(wanted)[1]));
  CHECK_FALSE(std::get<3>(outputs).has_value());
  CHECK(torch::equal(std::get<4>(outputs).left, column(41)));
  CHECK(torch::equal(std::get<4>(outputs).right, column(50)));
  CHECK(std::get<4>(outputs).number == 7);
  std::get<4>(outputs).right.sum().backward();
  CHECK(torch::equal(net->weight.grad(), column(50).sum()));

  // A batch from LibTorch's DataLoader.
  auto classifier = make_net();
  DataParallel trains(classifier, {.replicas = 2});
  const torch::data::Example<> batch{batch_of(5), torch::tensor({0, 1, 2, 0, 1})};
  const Tensor loss = trains.train_step(batch, [](NetImpl& replica, const torch::data::Example<>& part) {
    return torch::cross_entropy_loss(replica.forward(part.data), part.target);
  });
  auto alone = make_net();
  const Tensor wanted_loss = torch::cross_entropy_loss(alone->forward(batch.data), batch.target);
  wanted_loss.backward();
  CHECK(loss.item<double>() == Approx(wanted_loss.item<double>()).epsilon(1e-12));
  check_same_gradients(classifier, alone);
}

TEST_CASE("tree_map rebuilds supported containers", "[dp]") {
  const Tensor one = torch::ones({1});
  const auto doubled = [](const Tensor& tensor) { return tensor * 2; };
  const std::pair<std::array<Tensor, 2>, std::string> value{{one, one}, "name"};
  const auto twice = ddpkit::tree_map(value, doubled);
  CHECK(twice.first[1].item<float>() == 2);
  CHECK(twice.second == "name");
  torch::OrderedDict<std::string, Tensor> dict;
  dict.insert("a", one);
  CHECK(ddpkit::tree_map(dict, doubled)["a"].item<float>() == 2);
  CHECK(ddpkit::tree_map(torch::data::TensorExample(one), doubled).data.item<float>() == 2);
  CHECK(ddpkit::tree_leaves(std::make_tuple(one, 3, std::vector{one, one}, std::optional<Tensor>())).size() == 3);
  struct Unknown {
    int number;
  };
  CHECK(ddpkit::tree_map(Unknown{4}, doubled).number == 4);
}
