// The state of the fused optimizers: its layout, and archives that LibTorch's optimizers read and write.
#include <torch/torch.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_sgd.h>

#include "optim/state_tensors.h"
#include "support/catch.h"
#include "tensor/tensor_memory.h"
#include "unit/optimizer_parameters.h"

using namespace ddpkit::testing;
using ddpkit::optim::FusedAdam;
using ddpkit::optim::FusedAdamW;
using ddpkit::optim::FusedSGD;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

namespace {

template <class Optimizer>
std::string archive_of(const Optimizer& optimizer) {
  std::ostringstream stream;
  torch::save(optimizer, stream);
  return stream.str();
}

template <class Optimizer>
void load_archive(Optimizer& optimizer, const std::string& archive) {
  std::istringstream stream(archive);
  torch::load(optimizer, stream);
}

/// Trains the first optimizer, moves its state into the second, and continues to train with the second.
template <class First, class Second, class Options>
void check_archive(const Options& options) {
  const auto parameters = make_parameters(torch::kDouble);
  const auto references = copies_of(parameters);
  First first(parameters, options);
  Second throughout(references, options);
  take_steps(0, 10, parameters, first, references, throughout);
  // The load must replace these options and the state after a step.
  Options other(0.5);
  const auto continued = copies_of(parameters);
  Second second(continued, other);
  set_gradients(0, continued, copies_of(continued));
  second.step();
  {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < continued.size(); ++i) continued[i].copy_(parameters[i]);
  }
  load_archive(second, archive_of(first));
  CHECK(static_cast<Options&>(second.param_groups()[0].options()) == options);
  take_steps(10, 20, continued, second, references, throughout);
  check_same(continued, references, 1e-12);
}

/// Trains the first optimizer, copies its state into the second as to a new rank, and continues to train with both.
template <class Optimizer, class Options, class... More>
void check_copy(torch::ScalarType dtype, const Options& options, const More&... more) {
  const auto parameters = make_parameters(dtype);
  Optimizer first(parameters, options, more...);
  const auto copies = copies_of(parameters);
  Optimizer second(copies, Options(0.5), more...);
  take_steps(0, 4, parameters, first, copies, second);
  {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < copies.size(); ++i) copies[i].copy_(parameters[i]);
  }
  torch::serialize::OutputArchive saved;
  ddpkit::optim::write_without_tensors(first, saved);
  std::ostringstream stream;
  saved.save_to(stream);
  std::istringstream bytes(stream.str());
  torch::serialize::InputArchive loaded;
  loaded.load_from(bytes);
  ddpkit::optim::prepare_state(second);
  ddpkit::optim::read_without_tensors(second, loaded);
  const auto from = ddpkit::optim::state_tensors(first), to = ddpkit::optim::state_tensors(second);
  REQUIRE(from.size() == to.size());
  std::vector<torch::Tensor> sent;
  for (const auto& tensor : from)
    ddpkit::transfer_bytes(tensor, false, [&](const torch::Tensor& elements) { sent.push_back(elements.clone()); });
  auto next = sent.begin();
  for (const auto& tensor : to)
    ddpkit::transfer_bytes(tensor, true, [&](const torch::Tensor& elements) { elements.copy_(*next++); });
  CHECK(static_cast<Options&>(second.param_groups()[0].options()) == options);
  take_steps(4, 12, parameters, first, copies, second);
  for (std::size_t i = 0; i < copies.size(); ++i) CHECK(torch::equal(copies[i], parameters[i]));
}

}  // namespace

TEST_CASE("the state is flat: one tensor for each kind, group, type and device", "[optim]") {
  auto a = torch::ones({3, 5}).requires_grad_(true), b = torch::ones({7}).requires_grad_(true);
  auto c = torch::ones({4}, torch::kDouble).requires_grad_(true);
  FusedAdamW optimizer({a, b, c}, AdamWOptions(0.1));
  CHECK(flat_state(optimizer).at(0).tensors.empty());
  for (const auto& parameter : {a, b, c}) parameter.mutable_grad() = torch::ones_like(parameter);
  optimizer.step();
  const auto& states = flat_state(optimizer);
  REQUIRE(states.size() == 2);
  CHECK(states[0].offsets == std::vector<std::int64_t>{0, 16});
  REQUIRE(states[0].tensors.size() == 2);
  CHECK(states[0].tensors[0].numel() == 32);
  CHECK(states[0].tensors[0].is_contiguous());
  CHECK(states[0].parameters[1].is_same(b));
  CHECK(states[1].dtype == torch::kDouble);
  const auto& state = static_cast<torch::optim::AdamWParamState&>(*optimizer.state()[b.unsafeGetTensorImpl()]);
  CHECK(state.step() == 1);
  CHECK(state.exp_avg().const_data_ptr<float>() == states[0].tensors[0].const_data_ptr<float>() + 16);
  CHECK(torch::allclose(state.exp_avg(), torch::full({7}, 0.1f)));
  CHECK(torch::equal(states[0].tensors[0].slice(0, 15, 16), torch::zeros({1})));
}

TEST_CASE("archives go from LibTorch's optimizers to ours and back", "[optim]") {
  const auto adamw = AdamWOptions(1e-2).amsgrad(true).weight_decay(0.2);
  check_archive<FusedAdamW, FusedAdamW>(adamw);
  check_archive<FusedAdamW, torch::optim::AdamW>(adamw);
  check_archive<torch::optim::AdamW, FusedAdamW>(adamw);
  const auto adam = AdamOptions(1e-2).weight_decay(0.2);
  check_archive<FusedAdam, torch::optim::Adam>(adam);
  check_archive<torch::optim::Adam, FusedAdam>(adam);
  for (const auto& sgd : {SGDOptions(1e-2).momentum(0.9), SGDOptions(1e-2)}) {
    check_archive<FusedSGD, FusedSGD>(sgd);
    check_archive<FusedSGD, torch::optim::SGD>(sgd);
    check_archive<torch::optim::SGD, FusedSGD>(sgd);
  }
}

TEST_CASE("a copy of an optimizer's state continues with the same bits", "[optim]") {
  check_copy<torch::optim::AdamW>(torch::kFloat, AdamWOptions(0.01).weight_decay(0.1));
  check_copy<torch::optim::Adam>(torch::kDouble, AdamOptions(0.02).amsgrad(true));
  check_copy<torch::optim::SGD>(torch::kFloat, SGDOptions(0.01).momentum(0.9).nesterov(true));
  check_copy<torch::optim::SGD>(torch::kFloat, SGDOptions(0.01));
  check_copy<torch::optim::RMSprop>(torch::kFloat, torch::optim::RMSpropOptions(0.01).momentum(0.9));
  check_copy<FusedAdamW>(torch::kFloat, AdamWOptions(0.01).amsgrad(true));
  check_copy<FusedAdam>(torch::kBFloat16, AdamOptions(0.02), ddpkit::optim::FusedOptions{.master_weights = true});
  check_copy<FusedSGD>(torch::kDouble, SGDOptions(0.01).momentum(0.9));
  check_copy<FusedSGD>(torch::kHalf, SGDOptions(0.01), ddpkit::optim::FusedOptions{.master_weights = true});
}

TEST_CASE("a copy of the state of another optimizer is refused and changes nothing", "[optim]") {
  const auto parameters = make_parameters(torch::kFloat);
  FusedAdamW all(parameters, AdamWOptions(0.01)), one({parameters[0]}, AdamWOptions(0.02));
  set_gradients(0, parameters, parameters);
  one.step();
  torch::serialize::OutputArchive saved;
  ddpkit::optim::write_without_tensors(all, saved);
  std::stringstream bytes;
  saved.save_to(bytes);
  torch::serialize::InputArchive loaded;
  loaded.load_from(bytes);
  const auto before = ddpkit::optim::state_tensors(one);
  CHECK_THROWS_WITH(ddpkit::optim::read_without_tensors(one, loaded),
                    "the optimizer has 1 parameters, but its archive 7");
  CHECK(static_cast<AdamWOptions&>(one.param_groups()[0].options()).lr() == 0.02);
  CHECK(ddpkit::optim::state_tensors(one).size() == before.size());
}

TEST_CASE("an archive holds each tensor of the state once", "[optim]") {
  std::vector<torch::Tensor> parameters;
  for (int i = 0; i < 20; ++i) {
    parameters.push_back(torch::randn({1000}).requires_grad_(true));
    parameters.back().mutable_grad() = torch::randn({1000});
  }
  FusedAdamW optimizer(parameters);
  optimizer.step();
  CHECK(archive_of(optimizer).size() < 20 * 2 * 4000 * 2);
  // Saving leaves the state where it was.
  const auto& state =
      static_cast<torch::optim::AdamWParamState&>(*optimizer.state()[parameters[0].unsafeGetTensorImpl()]);
  CHECK(state.exp_avg().const_data_ptr() == flat_state(optimizer)[0].tensors[0].const_data_ptr());
}

TEST_CASE("an archive of another model is refused and changes nothing", "[optim]") {
  auto small = torch::ones({3}).requires_grad_(true), large = torch::ones({4}).requires_grad_(true);
  small.mutable_grad() = torch::ones({3});
  large.mutable_grad() = torch::ones({4});
  FusedAdamW of_small({small}, AdamWOptions(0.1)), of_large({large}, AdamWOptions(0.2));
  of_small.step();
  of_large.step();
  CHECK_THROWS_WITH(load_archive(of_large, archive_of(of_small)),
                    ContainsSubstring("is [3] where the parameter is [4]"));
  CHECK(of_large.param_groups()[0].options().get_lr() == 0.2);
  const auto before = large.detach().clone();
  of_large.step();
  CHECK_FALSE(torch::equal(large, before));
  CHECK(static_cast<torch::optim::AdamWParamState&>(*of_large.state()[large.unsafeGetTensorImpl()]).step() == 2);
}

TEST_CASE("archives count a weight under two names once, whoever wrote them", "[optim]") {
  const auto tied = [] { return std::vector<torch::Tensor>(2, torch::ones({3}).requires_grad_(true)); };
  const auto first = tied(), second = tied(), reference = tied();
  torch::optim::AdamW of_torch(first, AdamWOptions(0.1));
  FusedAdamW ours(second, AdamWOptions(0.1));
  for (const auto& parameters : {first, second}) parameters[0].mutable_grad() = torch::full({3}, 2.0f);
  of_torch.step();  // Two updates per step, like LibTorch.
  ours.step();
  for (const std::string& archive : {archive_of(of_torch), archive_of(ours)}) {
    FusedAdamW loaded(reference, AdamWOptions(0.5));
    load_archive(loaded, archive);
    reference[0].mutable_grad() = torch::ones({3});
    loaded.step();
    CHECK(loaded.state().size() == 1);
  }
  torch::optim::AdamW back({second[0]}, AdamWOptions(0.5));
  load_archive(back, archive_of(ours));
  CHECK(back.state().size() == 1);
}

TEST_CASE("a load keeps the state's memory, which a CUDA graph may use", "[optim]") {
  auto a = torch::ones({3}).requires_grad_(true), b = torch::ones({3}).requires_grad_(true);
  FusedAdamW optimizer({a, b}, AdamWOptions(0.1));
  a.mutable_grad() = torch::ones({3});
  optimizer.step();
  const std::string archive = archive_of(optimizer);
  const auto moments = flat_state(optimizer)[0].tensors[0].narrow(0, 0, 3).clone();
  b.mutable_grad() = torch::ones({3});
  optimizer.step();
  const void* place = flat_state(optimizer)[0].tensors[0].const_data_ptr();
  load_archive(optimizer, archive);
  CHECK(flat_state(optimizer)[0].tensors[0].const_data_ptr() == place);
  CHECK(torch::equal(flat_state(optimizer)[0].tensors[0].narrow(0, 0, 3), moments));
  CHECK(flat_state(optimizer)[0].tensors[0].narrow(0, 16, 3).abs().sum().item<float>() == 0);
}

TEST_CASE("state follows a model that moves to another type", "[optim]") {
  torch::nn::Linear model(3, 2);
  FusedSGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
  model->forward(torch::ones({1, 3})).sum().backward();
  optimizer.step();
  model->to(torch::kDouble);
  model->zero_grad();
  model->forward(torch::ones({1, 3}, torch::kDouble)).sum().backward();
  const auto before = model->bias.detach().clone();
  optimizer.step();
  CHECK(flat_state(optimizer)[0].dtype == torch::kDouble);
  // Gradients of 1: the second step has momentum.
  CHECK(torch::allclose(before - model->bias.detach(), torch::full({2}, 0.19, torch::kDouble)));
}
