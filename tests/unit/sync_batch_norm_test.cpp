// Tests that need only one rank. tests/ranks/sync_batch_norm_test.cpp has the other tests.
#include <torch/torch.h>

#include <sstream>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>
#include <ddpkit/parallel/sync_batch_norm.h>

#include "support/catch.h"

using ddpkit::SyncBatchNorm;
using ddpkit::SyncBatchNormImpl;
using torch::nn::BatchNormOptions;

namespace {

ddpkit::ProcessGroup world_of_one() {
  return ddpkit::init_process_group({.backend = "shm", .environment = ddpkit::LaunchEnvironment{}});
}

/// Calls its batch norm through a private member, which convert_sync_batchnorm cannot replace.
struct WithMemberImpl : torch::nn::Module {
  WithMemberImpl() { norm = register_module("norm", torch::nn::BatchNorm2d(2)); }
  torch::Tensor forward(const torch::Tensor& x) { return norm(x); }
  torch::nn::BatchNorm2d norm{nullptr};
};
TORCH_MODULE(WithMember);

struct OwnNormImpl : torch::nn::BatchNorm1dImpl {
  OwnNormImpl() : torch::nn::BatchNorm1dImpl(2) {}
  torch::Tensor forward(const torch::Tensor& x) { return 2 * torch::nn::BatchNorm1dImpl::forward(x); }
};
TORCH_MODULE(OwnNorm);

/// A Sequential with an additional batch norm outside its list.
struct OwnSequentialImpl : torch::nn::SequentialImpl {
  OwnSequentialImpl() : torch::nn::SequentialImpl(torch::nn::BatchNorm1d(2)) {
    beside = register_module("beside", torch::nn::BatchNorm1d(2));
  }
  torch::Tensor forward(const torch::Tensor& x) { return beside(torch::nn::SequentialImpl::forward(x)); }
  torch::nn::BatchNorm1d beside{nullptr};
};
TORCH_MODULE(OwnSequential);

}  // namespace

TEST_CASE("SyncBatchNorm without a group is batch norm", "[sync_batch_norm]") {
  torch::manual_seed(0);
  const auto x = torch::randn({6, 4, 3});
  for (const auto& options : {BatchNormOptions(4), BatchNormOptions(4).affine(false), BatchNormOptions(4).momentum({}),
                              BatchNormOptions(4).track_running_stats(false)}) {
    torch::nn::BatchNorm1d plain(options);
    SyncBatchNorm sync(options);
    for (int step = 0; step < 2; ++step) CHECK(torch::equal(sync(x + step), plain(x + step)));
    if (options.track_running_stats()) CHECK(torch::equal(sync->running_var, plain->running_var));
    sync->eval();
    plain->eval();
    CHECK(torch::equal(sync(x), plain(x)));
  }
  SyncBatchNorm sync(4);
  CHECK_THROWS_WITH(sync(torch::randn({6, 3})), ContainsSubstring("[N, 4, ...], but got [6, 3]"));
  CHECK_THROWS_WITH(sync(torch::randn({4})), ContainsSubstring("got [4]"));
  CHECK_THROWS_WITH(sync(torch::randn({1, 4})), ContainsSubstring("more than one value"));
}

TEST_CASE("SyncBatchNorm is saved, loaded and cloned as batch norm", "[sync_batch_norm]") {
  torch::nn::BatchNorm1d plain(3);
  plain(torch::randn({5, 3}));
  std::stringstream stream;
  torch::save(plain, stream);
  SyncBatchNorm sync(3, world_of_one());
  torch::load(sync, stream);
  CHECK(torch::equal(sync->running_mean, plain->running_mean));
  CHECK(sync->num_batches_tracked.item<std::int64_t>() == 1);
  const auto copy = std::dynamic_pointer_cast<SyncBatchNormImpl>(sync->clone());
  REQUIRE(copy);
  CHECK(torch::equal(copy->running_mean, plain->running_mean));
  CHECK_FALSE(copy->running_mean.is_same(sync->running_mean));
  CHECK(copy->process_group().has_value());
  std::ostringstream text;
  text << *sync;
  CHECK(text.str() ==
        "ddpkit::SyncBatchNorm(3, eps=1e-05, momentum=0.1, affine=true, track_running_stats=true, ranks=1)");
}

TEST_CASE("conversion replaces batch norms in containers, on the same tensors and names", "[sync_batch_norm]") {
  const auto group = world_of_one();
  torch::nn::BatchNorm1d shared(2);
  torch::nn::Sequential sequential({{"linear", torch::nn::Linear(2, 2)}, {"norm", torch::nn::BatchNorm1d(2)}});
  torch::nn::ModuleList list(torch::nn::BatchNorm2d(2), shared, torch::nn::ReLU());
  torch::nn::ModuleDict dict(std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>{
      {"a", torch::nn::BatchNorm3d(2).ptr()}, {"b", shared.ptr()}});
  torch::nn::ModuleDict root(std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>{
      {"sequential", sequential.ptr()}, {"list", list.ptr()}, {"dict", dict.ptr()}, {"ready", SyncBatchNorm(2).ptr()}});
  list[0]->as<torch::nn::BatchNorm2d>()->weight.requires_grad_(false);
  dict["a"]->eval();
  const auto parameters = root->named_parameters();
  const auto buffers = root->named_buffers();

  const auto names = ddpkit::convert_sync_batchnorm(root, group);
  CHECK(names == std::vector<std::string>{"sequential.norm", "list.0", "list.1", "dict.a", "dict.b", "ready"});
  CHECK(root->named_parameters().keys() == parameters.keys());
  CHECK(root->named_buffers().keys() == buffers.keys());
  for (const auto& item : root->named_parameters()) CHECK(item.value().is_same(parameters[item.key()]));
  for (const auto& item : root->named_buffers()) CHECK(item.value().is_same(buffers[item.key()]));
  const auto is_sync = [](const std::shared_ptr<torch::nn::Module>& module) {
    const auto* sync = module->as<SyncBatchNorm>();
    return sync && sync->process_group().has_value();
  };
  CHECK(is_sync(sequential->ptr(1)));
  CHECK(is_sync(sequential->named_children()["norm"]));
  CHECK(is_sync(list[0]));
  CHECK(is_sync(list->named_children()["0"]));
  CHECK(is_sync(dict["a"]));
  CHECK(is_sync(dict->named_children()["a"]));
  CHECK(is_sync(root["ready"]));
  CHECK(list[1] == dict["b"]);
  CHECK(list[2]->as<torch::nn::ReLU>());
  CHECK_FALSE(list[0]->as<SyncBatchNorm>()->weight.requires_grad());
  CHECK_FALSE(dict["a"]->is_training());
  // Forward calls the new module.
  sequential->forward(torch::randn({4, 2}));
  CHECK(sequential->ptr(1)->as<SyncBatchNorm>()->num_batches_tracked.item<std::int64_t>() == 1);
  // A second conversion replaces nothing.
  CHECK(ddpkit::convert_sync_batchnorm(root, group) == names);
}

TEST_CASE("conversion names a module that it cannot replace, and changes nothing then", "[sync_batch_norm]") {
  const auto group = world_of_one();
  torch::nn::Sequential model(torch::nn::BatchNorm2d(2), WithMember());
  CHECK_THROWS_WITH(ddpkit::convert_sync_batchnorm(model, group),
                    ContainsSubstring("1.norm is a member of") && ContainsSubstring("WithMemberImpl") &&
                        ContainsSubstring("Declare them as ddpkit::SyncBatchNorm"));
  CHECK(model->ptr(0)->as<torch::nn::BatchNorm2d>());
  CHECK_THROWS_WITH(ddpkit::convert_sync_batchnorm(torch::nn::Sequential(OwnNorm()), group),
                    ContainsSubstring("0 is a") && ContainsSubstring("OwnNormImpl"));
  CHECK_THROWS_WITH(ddpkit::convert_sync_batchnorm(OwnSequential(), group), ContainsSubstring("beside is a member of"));
  CHECK_THROWS_WITH(ddpkit::convert_sync_batchnorm(torch::nn::BatchNorm1d(2), group),
                    ContainsSubstring("itself a batch norm"));
  // Instance norm is not batch norm.
  CHECK(ddpkit::convert_sync_batchnorm(torch::nn::Sequential(torch::nn::InstanceNorm1d(2)), group).empty());
}
