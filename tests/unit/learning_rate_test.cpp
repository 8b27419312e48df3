#include <ddpkit/error.h>
#include <ddpkit/optim/fused_sgd.h>
#include <ddpkit/optim/learning_rate.h>
#include <torch/torch.h>

#include <sstream>

#include "support/catch.h"

using namespace ddpkit::optim;

namespace {

std::vector<double> first(int count, const Schedule& schedule) {
  std::vector<double> factors;
  for (int step = 0; step < count; ++step) factors.push_back(schedule(step));
  return factors;
}

void check(const std::vector<double>& actual, const std::vector<double>& expected) {
  REQUIRE(actual.size() == expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) CHECK(actual[i] == Approx(expected[i]).margin(1e-15));
}

FusedSGD two_groups() {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<torch::Tensor>{torch::ones({1}).requires_grad_(true)});
  groups.emplace_back(std::vector<torch::Tensor>{torch::ones({1}).requires_grad_(true)},
                      std::make_unique<torch::optim::SGDOptions>(0.01));
  return FusedSGD(groups, torch::optim::SGDOptions(0.1));
}

}  // namespace

TEST_CASE("schedules give the factors of Python's", "[learning_rate]") {
  // torch.optim.lr_scheduler 2.11: LinearLR(start_factor=0.5, total_iters=4), CosineAnnealingLR(T_max=4, eta_min=0.1)
  // of 1, StepLR(2, 0.1), MultiStepLR([1, 3], 0.5).
  check(first(6, warmup(4, 0.5)), {0.5, 0.625, 0.75, 0.875, 1, 1});
  check(first(6, cosine_decay(4, 0.1)), {1, 0.868198051533946, 0.55, 0.23180194846605, 0.1, 0.1});
  check(first(5, step_decay(2)), {1, 1, 0.1, 0.1, 0.01});
  check(first(5, multi_step_decay({1, 3}, 0.5)), {1, 0.5, 0.5, 0.25, 0.25});
  check(first(3, Schedule()), {1, 1, 1});
}

TEST_CASE("schedules follow one another and multiply", "[learning_rate]") {
  check(first(7, sequential({warmup(2, 0.5), step_decay(2, 0.5)}, {2})), {0.5, 0.75, 1, 1, 0.5, 0.5, 0.25});
  check(first(5, warmup(2, 0) * step_decay(2, 0.5)), {0, 0.5, 0.5, 0.5, 0.25});
  CHECK_THROWS_WITH(sequential({Schedule()}, {2}), ContainsSubstring("got 1 for 1"));
  CHECK_THROWS_WITH(multi_step_decay({3, 1}), ContainsSubstring("[3, 1]"));
  CHECK_THROWS_AS(warmup(0), ddpkit::InvalidArgument);
}

TEST_CASE("the learning rate follows the number of ranks", "[learning_rate]") {
  CHECK(learning_rate_scale(LearningRateScaling::kNone, 16) == 1);
  CHECK(learning_rate_scale(LearningRateScaling::kLinear, 16) == 16);
  CHECK(learning_rate_scale(LearningRateScaling::kSquareRoot, 16) == 4);
  CHECK_THROWS_AS(learning_rate_scale(LearningRateScaling::kLinear, 0), ddpkit::InvalidArgument);
  auto optimizer = two_groups();
  // Goyal's gradual warm-up: from the rate of one rank to the rate of all ranks.
  LearningRateScheduler scheduler(optimizer, warmup(3, 1.0 / 4),
                                  {.scaling = LearningRateScaling::kLinear, .world_size = 4});
  check(scheduler.learning_rates(), {0.1, 0.01});
  for (int step = 0; step < 3; ++step) scheduler.step();
  check(scheduler.learning_rates(), {0.4, 0.04});
  check(scheduler.base_learning_rates(), {0.1, 0.01});
}

TEST_CASE("a schedule made after the optimizer's load starts from the rates before any schedule", "[learning_rate]") {
  const auto archive = [](const auto& optimizer) {
    std::ostringstream stream;
    torch::save(optimizer, stream);
    return stream.str();
  };
  auto optimizer = two_groups();
  LearningRateScheduler scheduler(optimizer, step_decay(1));
  scheduler.step();
  check(scheduler.learning_rates(), {0.01, 0.001});
  auto resumed = two_groups();
  std::istringstream saved(archive(optimizer));
  torch::load(resumed, saved);
  LearningRateScheduler after(resumed, step_decay(1));
  check(after.base_learning_rates(), {0.1, 0.01});
  // As in Python, the first schedule's base is also the base of a second schedule.
  LearningRateScheduler second(resumed, step_decay(1));
  check(second.base_learning_rates(), {0.1, 0.01});
  // An optimizer that never had a schedule has its own rates as base.
  auto plain = two_groups();
  plain.param_groups()[0].options().set_lr(0.7);
  std::istringstream saved_plain(archive(plain));
  torch::load(resumed, saved_plain);
  LearningRateScheduler fresh(resumed, step_decay(1));
  check(fresh.base_learning_rates(), {0.7, 0.01});
}

TEST_CASE("a schedule resumes, on another number of ranks too", "[learning_rate]") {
  const auto options = [](int ranks) {
    return LearningRateOptions{.scaling = LearningRateScaling::kLinear, .world_size = ranks};
  };
  auto optimizer = two_groups();
  LearningRateScheduler scheduler(optimizer, cosine_decay(10), options(2));
  for (int step = 0; step < 4; ++step) scheduler.step();
  std::stringstream optimizer_archive, archive;
  torch::save(optimizer, optimizer_archive);
  torch::serialize::OutputArchive output;
  scheduler.save(output);
  output.save_to(archive);

  for (const int ranks : {2, 3}) {
    auto resumed_optimizer = two_groups();
    std::istringstream saved_optimizer(optimizer_archive.str());
    torch::load(resumed_optimizer, saved_optimizer);
    // The optimizer has the rates of step 4, which are no base rates; the archive has the base rates.
    LearningRateScheduler resumed(resumed_optimizer, cosine_decay(10), options(ranks));
    std::istringstream saved(archive.str());
    torch::serialize::InputArchive input;
    input.load_from(saved);
    resumed.load(input);
    CHECK(resumed.steps() == 4);
    resumed.step();
    auto expected = first(6, cosine_decay(10));
    check(resumed.learning_rates(), {0.1 * ranks * expected[5], 0.01 * ranks * expected[5]});
    resumed.set_step(2);
    CHECK(resumed.steps() == 2);
    check(resumed.learning_rates(), {0.1 * ranks * expected[2], 0.01 * ranks * expected[2]});
    CHECK_THROWS_WITH(resumed.set_step(-1), ContainsSubstring("step -1"));

    // An optimizer that did not load its archive gets the base rates of the schedule's archive.
    FusedSGD fresh(
        {torch::optim::OptimizerParamGroup({torch::ones({1})}), torch::optim::OptimizerParamGroup({torch::ones({1})})},
        torch::optim::SGDOptions(7));
    LearningRateScheduler of_fresh(fresh, cosine_decay(10), options(ranks));
    of_fresh.load(input);
    check(of_fresh.learning_rates(), {0.1 * ranks * expected[4], 0.01 * ranks * expected[4]});
  }
  std::istringstream saved(archive.str());
  torch::serialize::InputArchive input;
  input.load_from(saved);
  FusedSGD one_group({torch::ones({1})}, torch::optim::SGDOptions(0.5));
  LearningRateScheduler other(one_group, Schedule());
  CHECK_THROWS_WITH(other.load(input), ContainsSubstring("with 2 parameter groups, but the optimizer has 1"));
  check(other.learning_rates(), {0.5});
  one_group.add_param_group(torch::optim::OptimizerParamGroup({torch::ones({1})}));
  CHECK_THROWS_WITH(other.step(), ContainsSubstring("has 2 parameter groups, but had 1"));
}
