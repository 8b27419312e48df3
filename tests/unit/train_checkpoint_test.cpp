#include <torch/script.h>
#include <torch/torch.h>

#include <cstdio>
#include <sstream>

#include <ddpkit/error.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_sgd.h>
#include <ddpkit/optim/grad_scaler.h>
#include <ddpkit/optim/learning_rate.h>
#include <ddpkit/train/checkpoint.h>
#include <ddpkit/train/seed.h>

#include "support/captured_stderr.h"
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

// Does what a wrapper does: a checkpoint refuses parameters that differ between ranks.
void replicate(const Net& net, const ddpkit::ProcessGroup& group) {
  const torch::NoGradGuard no_grad;
  for (const at::Tensor& parameter : net->parameters()) group.broadcast(parameter, 0);
}

// A checkpoint of a net after a few steps.
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

TEST_CASE("a run resumes from its checkpoint as if it had never stopped", "[checkpoint]") {
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
  const Folder folder;  // Only rank 0's folder is used.
  Net net;
  replicate(net, group);
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
  // A load that needs a missing part fails and changes nothing.
  const auto before = other->conv->weight.clone();
  step(other, other_optimizer);
  const auto stepped = other->conv->weight.clone();
  CHECK_FALSE(stepped.equal(before));
  CHECK_THROWS_WITH(load_checkpoint(folder / "checkpoint.pt", *other, other_optimizer, group,
                                    {checkpoint_part("hook", other_scaler)}),
                    ContainsSubstring("has no hook"));
  CHECK(other->conv->weight.equal(stepped));
}

TEST_CASE("a checkpoint goes from torch::optim's optimizers to the fused ones and back", "[checkpoint]") {
  Trained trained;
  Net other, third;
  ddpkit::optim::FusedAdamW fused(other->parameters(), torch::optim::AdamWOptions(0.5));
  read_checkpoint(trained.path, *other, fused);
  CHECK(fused.param_groups()[0].options().get_lr() == 0.01);
  write_checkpoint(trained.folder / "fused.pt", *other, fused, {});
  torch::optim::AdamW plain(third->parameters(), torch::optim::AdamWOptions(0.5));
  read_checkpoint(trained.folder / "fused.pt", *third, plain);
  for (const auto& net : {trained.net, other, third}) {
    for (const auto& parameter : net->parameters()) parameter.mutable_grad() = torch::full_like(parameter, 0.1);
  }
  trained.optimizer.step();
  fused.step();
  plain.step();
  CHECK(same(*trained.net, *third));
  for (const auto& item : trained.net->named_parameters())
    CHECK(torch::allclose(item.value(), other->named_parameters()[item.key()], 1e-5, 1e-6));
  ddpkit::optim::FusedSGD sgd(other->parameters(), 0.1);
  CHECK_THROWS_WITH(read_checkpoint(trained.folder / "fused.pt", *other, sgd), ContainsSubstring("torch::optim::SGD"));
}

TEST_CASE("a run resumes with a weight under two names", "[checkpoint]") {
  struct Tied : torch::nn::Module {
    Tied() {
      first = register_parameter("first", torch::ones({3}));
      register_parameter("second", first);
    }
    torch::Tensor first;
  };
  const auto check = [](const auto& make) {
    Folder folder;
    Tied model, resumed;
    auto optimizer = make(model.parameters());
    auto resumed_optimizer = make(resumed.parameters());
    const auto step = [](const Tied& tied, torch::optim::Optimizer& any) {
      tied.first.mutable_grad() = torch::full({3}, 0.5f);
      any.step();
    };
    step(model, *optimizer);
    write_checkpoint(folder / "tied.pt", model, *optimizer, {});
    read_checkpoint(folder / "tied.pt", resumed, *resumed_optimizer);
    step(model, *optimizer);
    step(resumed, *resumed_optimizer);
    CHECK(model.first.equal(resumed.first));
  };
  const torch::optim::AdamWOptions options(0.1);
  check([&](auto parameters) { return std::make_unique<torch::optim::AdamW>(parameters, options); });
  check([&](auto parameters) { return std::make_unique<ddpkit::optim::FusedAdamW>(parameters, options); });
  check([&](auto parameters) {
    return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
  });
}

TEST_CASE("a schedule made after the load of a checkpoint starts from the rate before any schedule", "[checkpoint]") {
  Trained trained;
  ddpkit::optim::LearningRateScheduler scheduler(trained.optimizer, ddpkit::optim::step_decay(1));
  scheduler.step();
  write_checkpoint(trained.path, *trained.net, trained.optimizer, {});
  Net other;
  torch::optim::AdamW optimizer(other->parameters(), torch::optim::AdamWOptions(0.5));
  read_checkpoint(trained.path, *other, optimizer);
  CHECK(optimizer.param_groups()[0].options().get_lr() == Approx(0.001));
  ddpkit::optim::LearningRateScheduler after(optimizer, ddpkit::optim::step_decay(1));
  CHECK(after.base_learning_rates() == std::vector<double>{0.01});
}

TEST_CASE("a checkpoint of another optimizer is refused", "[checkpoint]") {
  Trained trained;
  Net other;
  torch::optim::SGD optimizer(other->parameters(), 0.1);
  CHECK_THROWS_WITH(read_checkpoint(trained.path, *other, optimizer),
                    ContainsSubstring("torch::optim::AdamW") && ContainsSubstring("torch::optim::SGD"));
}

TEST_CASE("a file that is not a checkpoint is refused with a sentence", "[checkpoint]") {
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

TEST_CASE("a checkpoint of which one bit has flipped is refused", "[checkpoint]") {
  Trained trained;
  const std::string good = read_file(trained.path);
  Net other;
  torch::optim::AdamW optimizer(other->parameters(), torch::optim::AdamWOptions(0.01));
  const auto before = other->conv->weight.clone();
  for (std::size_t part = 0; part <= 200; ++part) {
    std::string bad = good;
    const std::size_t place = std::min(good.size() - 1, good.size() * part / 200);
    bad[place] = static_cast<char>(bad[place] ^ (1 << (part % 8)));
    write_file(trained.folder / "bad", bad);
    CAPTURE(place);
    CHECK_THROWS_AS(read_checkpoint(trained.folder / "bad", *other, optimizer), ddpkit::InvalidArgument);
  }
  CHECK(other->conv->weight.equal(before));
  CHECK(optimizer.state().empty());
}

TEST_CASE("an archive that holds code is not read", "[checkpoint]") {
  torch::jit::Module module("m");
  module.define(
      "def __setstate__(self, state: int):\n    print('this was run')\ndef __getstate__(self) -> int:\n    return 1\n");
  std::ostringstream stream;
  module.save(stream);
  // The end of a checkpoint: a comment with a checksum (RFC 3720). The archive's last two bytes give the comment's
  // length.
  std::string bytes = stream.str();
  bytes[bytes.size() - 2] = 22;
  std::uint32_t checksum = ~0U;
  for (const char c : bytes) {
    checksum ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) checksum = (checksum >> 1) ^ ((checksum & 1) != 0 ? 0x82f63b78U : 0U);
  }
  char seal[23];
  std::snprintf(seal, sizeof seal, "ddpkit crc32c %08x", ~checksum);
  const Folder folder;
  write_file(folder / "code.pt", bytes + seal);
  CHECK_THROWS_WITH(read_checkpoint_info(folder / "code.pt"), ContainsSubstring("holds code"));
}

RANK_TEST("the last checkpoints and the best one stay", "[checkpoint]", 1, 2) {
  const Folder folder;  // Only rank 0's folder is used.
  Net net;
  replicate(net, group);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
  for (const bool asynchronous : {false, true}) {
    CAPTURE(asynchronous);
    const auto path = folder / (asynchronous ? "a/checkpoint.pt" : "s/checkpoint.pt");
    std::filesystem::create_directories(path.parent_path());
    write_file(path.parent_path() / "checkpoint-x.pt", "not ours");
    {
      Checkpoint checkpoint(path, group, {.keep = 2, .asynchronous = asynchronous, .best_epoch_stem = "best-"});
      for (int i = 1; i <= 4; ++i) checkpoint.save(*net, optimizer, {.epoch = i, .step = 10 * i}, {}, i == 1 || i == 2);
      checkpoint.wait();
    }
    if (group.rank() > 0) continue;
    CHECK(names_in(path.parent_path()) == std::vector<std::string>{"best-1.pt", "best.pt", "checkpoint-30.pt",
                                                                   "checkpoint-40.pt", "checkpoint-x.pt",
                                                                   "checkpoint.pt"});
    CHECK(read_checkpoint_info(path).step == 40);
    CHECK(read_checkpoint_info(path.parent_path() / "checkpoint-30.pt").step == 30);
    for (const char* best : {"best.pt", "best-1.pt"}) CHECK(read_checkpoint_info(path.parent_path() / best).step == 20);
  }
  CHECK_THROWS_AS(Checkpoint(folder / "c", group, {.keep = 0}), ddpkit::InvalidArgument);
}

RANK_TEST("a damaged checkpoint gives way to the one before it", "[checkpoint]", 1, 2) {
  const Folder made;
  const std::filesystem::path folder = group.all_gather_bytes(made.path().string())[0];
  const std::filesystem::path path = folder / "checkpoint.pt";
  Net net;
  replicate(net, group);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
  Checkpoint checkpoint(path, group, {.keep = 3});
  for (int i = 1; i <= 3; ++i) checkpoint.save(*net, optimizer, {.epoch = i, .step = i});
  checkpoint.wait();
  // A hard link: the damage affects both names of the newest checkpoint.
  if (group.rank() == 0) std::filesystem::resize_file(path, 1000);
  group.barrier();
  std::string printed;
  CheckpointInfo info;
  printed = ddpkit::testing::stderr_of([&] { info = checkpoint.load(*net, optimizer); });
  CHECK(info.step == 2);
  if (group.rank() == 0) {
    CHECK_THAT(printed, ContainsSubstring("is truncated") && ContainsSubstring("resuming from") &&
                            ContainsSubstring("checkpoint-2.pt"));
    CHECK(names_in(folder) == std::vector<std::string>{"checkpoint-1.pt", "checkpoint-2.pt", "checkpoint-3.pt",
                                                       "checkpoint.pt", "checkpoint.pt.damaged"});
  }
  group.barrier();
  checkpoint.save(*net, optimizer, {.epoch = 3, .step = 3});
  checkpoint.wait();
  CHECK(read_checkpoint_info(folder / "checkpoint-3.pt").step == 3);
}

RANK_TEST("an asynchronous checkpoint has the state at its call, and its failure is reported", "[checkpoint]", 2) {
  const Folder folder;  // Only rank 0's folder is used.
  Net net;
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
  step(net, optimizer);
  replicate(net, group);
  const auto then = net->conv->weight.clone();
  {
    Checkpoint checkpoint(folder / "checkpoint.pt", group);
    checkpoint.save(*net, optimizer, {});
    for (int i = 0; i < 5; ++i) step(net, optimizer);
  }
  if (group.rank() == 0) {
    Net other;
    torch::optim::AdamW other_optimizer(other->parameters(), torch::optim::AdamWOptions(0.01));
    read_checkpoint(folder / "checkpoint.pt", *other, other_optimizer);
    CHECK(other->conv->weight.equal(then));
  }
  replicate(net, group);
  Checkpoint nowhere("/nonexistent/checkpoint.pt", group);
  nowhere.save(*net, optimizer, {});
  CHECK_THROWS_WITH(nowhere.wait(), ContainsSubstring("/nonexistent/checkpoint.pt") && ContainsSubstring("No such"));
  nowhere.save(*net, optimizer, {});
  CHECK_THROWS_WITH(nowhere.save(*net, optimizer, {}), ContainsSubstring("No such"));
  nowhere.wait();  // The error has been reported.
  group.barrier();
}

RANK_TEST("each rank finds its own generators, buffers and parts again", "[checkpoint]", 1, 2, 3) {
  const Folder made;
  const std::filesystem::path path = std::filesystem::path(group.all_gather_bytes(made.path().string())[0]) / "c.pt";
  torch::manual_seed(group.rank());
  Net net;
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
  for (int i = 0; i < 2; ++i) step(net, optimizer);  // The batch norms differ after this.
  replicate(net, group);
  struct Own {
    std::int64_t value = 0;
    void save(torch::serialize::OutputArchive& archive) const { archive.write("value", c10::IValue(value)); }
    void load(torch::serialize::InputArchive& archive) {
      c10::IValue read;
      archive.read("value", read);
      value = read.toInt();
    }
  } own{.value = 7 + group.rank()};
  save_checkpoint(path, *net, optimizer, {}, group, {checkpoint_part("own", own, /*of_each_rank=*/true)});
  const auto drawn = torch::rand({5});
  const auto mean = net->norm->running_mean.clone();
  Net other;
  torch::optim::AdamW other_optimizer(other->parameters(), torch::optim::AdamWOptions(0.01));
  own.value = 0;
  const auto info = load_checkpoint(path, *other, other_optimizer, group, {checkpoint_part("own", own, true)});
  CHECK(info.ranks == group.world_size());
  CHECK(own.value == 7 + group.rank());
  CHECK(torch::rand({5}).equal(drawn));
  CHECK(other->norm->running_mean.equal(mean));
  // A single process loads the weights and keeps the rest.
  own.value = 1;
  read_checkpoint(path, *other, other_optimizer, {checkpoint_part("own", own, true)});
  CHECK(own.value == (group.world_size() == 1 ? 7 : 1));
  group.barrier();
}

RANK_TEST("one rank's checkpoint reaches all ranks", "[checkpoint]", 1, 2, 3) {
  const Folder folder;  // Each rank has a folder; only rank 0's is used.
  torch::manual_seed(group.rank());
  Net net;
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
  step(net, optimizer);
  replicate(net, group);
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
  replicate(net, group);
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

TEST_CASE("A run that resumes within an epoch keeps its random generators, and the next epoch is seeded again",
          "[checkpoint]") {
  const auto drawn = [] { return torch::rand({}).item<float>(); };
  const Folder folder;
  Net net;
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
  CHECK(seed_epoch(7, 0, 0));
  const float first = drawn();
  write_checkpoint(folder / "within.pt", *net, optimizer, {});
  const float second = drawn();
  CHECK(seed_epoch(7, 1, 0));
  const float of_next = drawn();

  torch::manual_seed(99);
  read_checkpoint(folder / "within.pt", *net, optimizer);
  CHECK_FALSE(seed_epoch(7, 0, 0));
  CHECK(drawn() == second);
  CHECK(seed_epoch(7, 1, 0));
  CHECK(drawn() == of_next);
  INFO("Only the first call after loading keeps the generators.");
  CHECK(seed_epoch(7, 0, 0));
  CHECK(drawn() == first);

  INFO("A checkpoint at an epoch's end.");
  read_checkpoint(folder / "within.pt", *net, optimizer);
  CHECK(seed_epoch(7, 1, 0));
  CHECK(drawn() == of_next);
}
