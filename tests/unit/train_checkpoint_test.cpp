#include <torch/torch.h>

#include <ddpkit/comm/error.h>
#include <ddpkit/optim/grad_scaler.h>
#include <ddpkit/optim/learning_rate.h>
#include <ddpkit/train/checkpoint.h>

#include "support/catch.h"
#include "support/folder.h"
#include "support/ranks.h"

using namespace ddpkit::train;
using ddpkit::testing::Folder;
using ddpkit::testing::names_in;
using ddpkit::testing::read_file;
using ddpkit::testing::write_file;

namespace {

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int hidden = 5) {
    conv = register_module("conv", torch::nn::Conv1d(2, 3, 3));
    norm = register_module("norm", torch::nn::BatchNorm1d(3));
    lstm = register_module("lstm", torch::nn::LSTM(3, hidden));
    head = register_module("head", torch::nn::Sequential(torch::nn::Linear(hidden, 4), torch::nn::ReLU()));
  }
  at::Tensor forward(const at::Tensor& x) {
    return head->forward(std::get<0>(lstm(norm(conv(x)).permute({2, 0, 1})))[-1]);
  }
  torch::nn::Conv1d conv{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::Sequential head{nullptr};
};
TORCH_MODULE(Net);

void step(Net& net, torch::optim::Optimizer& optimizer) {
  optimizer.zero_grad();
  net->forward(torch::randn({6, 2, 9})).square().mean().backward();
  optimizer.step();
}

bool same(const torch::nn::Module& a, const torch::nn::Module& b) {
  const auto equal = [](const auto& x, const auto& y) {
    for (const auto& item : x) {
      if (!item.value().equal(y[item.key()])) return false;
    }
    return true;
  };
  return equal(a.named_parameters(), b.named_parameters()) && equal(a.named_buffers(), b.named_buffers());
}

// A checkpoint of a net that has been trained a little.
struct Trained {
  Trained() {
    for (int i = 0; i < 3; ++i) step(net, optimizer);
    write_checkpoint(path, *net, optimizer, {.epoch = 2, .step = 3, .config = R"({"lr":0.1})"});
  }
  Folder folder;
  std::filesystem::path path = folder / "checkpoint.pt";
  Net net;
  torch::optim::AdamW optimizer{net->parameters(), torch::optim::AdamWOptions(0.01)};
};

}  // namespace

TEST_CASE("a run goes on from its checkpoint as if it had never stopped", "[checkpoint]") {
  torch::manual_seed(1);
  Trained trained;
  Net other;
  torch::optim::AdamW optimizer(other->parameters(), torch::optim::AdamWOptions(0.5));
  const void* storage = other->conv->weight.data_ptr();
  const CheckpointInfo info = read_checkpoint(trained.path, *other, optimizer);
  CHECK(info.epoch == 2);
  CHECK(info.step == 3);
  CHECK(info.config == R"({"lr":0.1})");
  CHECK(other->conv->weight.data_ptr() == storage);
  CHECK(same(*trained.net, *other));
  torch::manual_seed(2);
  for (int i = 0; i < 3; ++i) step(trained.net, trained.optimizer);
  torch::manual_seed(2);
  for (int i = 0; i < 3; ++i) step(other, optimizer);
  CHECK(same(*trained.net, *other));
  CHECK(read_checkpoint_info(trained.path).epoch == 2);
  CHECK(names_in(trained.folder.path()) == std::vector<std::string>{"checkpoint.pt"});
}

TEST_CASE("a checkpoint of another model names the first parameter that differs, and changes nothing", "[checkpoint]") {
  Trained trained;
  const auto refuse = [&](torch::nn::Module& module, const std::string& difference) {
    torch::optim::AdamW optimizer(module.parameters());
    std::vector<at::Tensor> before;
    for (const auto& parameter : module.parameters()) before.push_back(parameter.clone());
    CHECK_THROWS_WITH(read_checkpoint(trained.path, module, optimizer),
                      ContainsSubstring("is of another model") && ContainsSubstring(difference));
    for (std::size_t i = 0; i < before.size(); ++i) CHECK(module.parameters()[i].equal(before[i]));
    CHECK(optimizer.state().empty());
  };
  Net wider(6);
  refuse(*wider, "lstm.weight_ih_l0 is Float [20, 3] there and Float [24, 3] here");
  Net longer;
  longer->head->push_back(torch::nn::Linear(4, 4));
  refuse(*longer, "it has no head.2");
  struct Less : torch::nn::Module {
    Less() {
      register_module("conv", torch::nn::Conv1d(2, 3, 3));
      register_module("norm", torch::nn::BatchNorm1d(3));
    }
  } less;
  refuse(less, "is not here");
  Net in_double;
  in_double->to(torch::kDouble);
  refuse(*in_double, "conv.weight is Float [3, 2, 3] there and Double [3, 2, 3] here");
}

RANK_TEST("a checkpoint holds what else a run needs", "[checkpoint]", 1, 2) {
  const Folder folder;  // Only rank 0's is used.
  Net net;
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
  ddpkit::optim::LearningRateScheduler schedule(optimizer, ddpkit::optim::cosine_decay(10));
  ddpkit::optim::GradScaler scaler(group);
  for (int i = 0; i < 4; ++i) schedule.step();
  scaler.scale(torch::ones(1));
  scaler.update(17.0);
  const auto parts = [](auto& a, auto& b) {
    return std::vector{checkpoint_part("schedule", a), checkpoint_part("scaler", b)};
  };
  save_checkpoint(folder / "checkpoint.pt", *net, optimizer, {}, group, parts(schedule, scaler));

  Net other;
  torch::optim::AdamW other_optimizer(other->parameters(), torch::optim::AdamWOptions(0.01));
  ddpkit::optim::LearningRateScheduler other_schedule(other_optimizer, ddpkit::optim::cosine_decay(10));
  ddpkit::optim::GradScaler other_scaler(group);
  load_checkpoint(folder / "checkpoint.pt", *other, other_optimizer, group, parts(other_schedule, other_scaler));
  CHECK(other_schedule.steps() == 4);
  CHECK(other_schedule.learning_rates() == schedule.learning_rates());
  CHECK(other_scaler.get_scale() == 17);
  // Who needs a part that is not there is told, and has lost nothing.
  const auto before = other->conv->weight.clone();
  step(other, other_optimizer);
  const auto stepped = other->conv->weight.clone();
  CHECK_FALSE(stepped.equal(before));
  CHECK_THROWS_WITH(load_checkpoint(folder / "checkpoint.pt", *other, other_optimizer, group,
                                    {checkpoint_part("hook", other_scaler)}),
                    ContainsSubstring("has no hook"));
  CHECK(other->conv->weight.equal(stepped));
}

TEST_CASE("a checkpoint of another optimizer is refused", "[checkpoint]") {
  Trained trained;
  Net other;
  torch::optim::SGD optimizer(other->parameters(), 0.1);
  CHECK_THROWS_WITH(read_checkpoint(trained.path, *other, optimizer),
                    ContainsSubstring("torch::optim::AdamW") && ContainsSubstring("torch::optim::SGD"));
}

TEST_CASE("what is no checkpoint is refused with a sentence", "[checkpoint]") {
  Trained trained;
  const auto info_of = [&](const std::string& bytes) {
    write_file(trained.folder / "bad", bytes);
    return read_checkpoint_info(trained.folder / "bad");
  };
  const std::string good = read_file(trained.path);
  CHECK_THROWS_WITH(info_of(""), ContainsSubstring("is not a checkpoint"));
  CHECK_THROWS_WITH(info_of("hello"), ContainsSubstring("is not a checkpoint"));
  CHECK_THROWS_AS(read_checkpoint_info(trained.folder / "none"), ddpkit::InvalidArgument);
  for (int part = 1; part < 20; ++part) {
    CHECK_THROWS_WITH(info_of(good.substr(0, good.size() * static_cast<std::size_t>(part) / 20)),
                      ContainsSubstring("truncated") || ContainsSubstring("damaged"));
  }
  for (int cut = 1; cut < 8; ++cut) {
    CHECK_THROWS_AS(info_of(good.substr(0, good.size() - static_cast<std::size_t>(cut))), ddpkit::InvalidArgument);
  }
  torch::save(torch::ones(3), (trained.folder / "tensor.pt").string());
  CHECK_THROWS_WITH(read_checkpoint_info(trained.folder / "tensor.pt"), ContainsSubstring("not a checkpoint"));
}

RANK_TEST("one rank's checkpoint reaches all ranks", "[checkpoint]", 1, 2, 3) {
  const Folder folder;  // Each rank's own: only rank 0's is used.
  torch::manual_seed(group.rank());
  Net net;
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
  step(net, optimizer);
  save_checkpoint(folder / "checkpoint.pt", *net, optimizer, {.epoch = 1, .step = 1, .config = "{}"}, group);
  CHECK(names_in(folder.path()).size() == (group.rank() == 0 ? 1 : 0));
  Net other;
  torch::optim::AdamW other_optimizer(other->parameters(), torch::optim::AdamWOptions(0.01));
  const CheckpointInfo info = load_checkpoint(folder / "checkpoint.pt", *other, other_optimizer, group);
  CHECK(info.epoch == 1);
  if (group.rank() == 0) CHECK(same(*net, *other));
  for (const auto& parameter : other->parameters()) {
    const at::Tensor all = group.all_gather(parameter.detach().contiguous());
    for (int rank = 0; rank < group.world_size(); ++rank) CHECK(all[rank].equal(all[0]));
  }
}

RANK_TEST("a checkpoint that cannot be written is an error on every rank", "[checkpoint]", 2) {
  Net net;
  torch::optim::AdamW optimizer(net->parameters());
  try {
    save_checkpoint("/nonexistent/checkpoint.pt", *net, optimizer, {}, group);
    FAIL("no error");
  } catch (const ddpkit::Error& error) {
    CHECK_THAT(error.what(), ContainsSubstring("/nonexistent/checkpoint.pt") && ContainsSubstring("No such file"));
    CHECK(error.context().rank == 0);
  }
  CHECK_THROWS_WITH(load_checkpoint("/nonexistent/checkpoint.pt", *net, optimizer, group),
                    ContainsSubstring("there is no checkpoint /nonexistent/checkpoint.pt"));
  group.barrier();
}
