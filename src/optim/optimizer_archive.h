// Tier 2: torch/optim/optimizer.h. Extends LibTorch's optimizer archives: duplicate parameters count once, and
// parameter groups keep the initial rate of their schedule.
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/optim/clip_grad_norm.h>

namespace ddpkit::optim {

/// Returns `initial_lr` of a parameter group, as in Python: the learning rate before any schedule. Empty before the
/// first LearningRateScheduler.
std::optional<double> initial_rate(const torch::optim::OptimizerOptions& options);
/// Replaces the group's options by a copy that keeps the rate, in archives too. No effect on options of types that are
/// not in torch::optim.
void set_initial_rate(torch::optim::OptimizerParamGroup& group, double rate);

/// Base of options that keep their initial rate.
class InitialRate {
 public:
  virtual ~InitialRate() = default;
  double initial_lr = 0;
};

/// Options with `initial_lr`. Clones and archives include the rate. torch::load() of a torch::optim optimizer ignores
/// it; read_archive() restores it.
template <class Options>
class WithInitialRate final : public Options, public InitialRate {
 public:
  WithInitialRate(const Options& options, double rate) : Options(options) { initial_lr = rate; }
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override {
    return std::make_unique<WithInitialRate>(*this);
  }
  using Options::serialize;
  void serialize(torch::serialize::OutputArchive& archive) const override {
    Options::serialize(archive);
    archive.write("initial_lr", c10::IValue(initial_lr));
  }
};

inline c10::IValue read_value(torch::serialize::InputArchive& archive, const char* key) {
  c10::IValue value;
  archive.read(key, value);
  return value;
}

/// Like torch::optim::serialize(), with these differences: duplicate parameters or keys in a group count once, initial
/// rates are restored, and an exception leaves everything unchanged.
template <class State, class Options>
void read_archive(torch::serialize::InputArchive& archive, torch::optim::Optimizer& optimizer) {
  torch::serialize::InputArchive state_archive, groups_archive;
  archive.read("state", state_archive);
  archive.read("param_groups", groups_archive);
  std::remove_reference_t<decltype(optimizer.state())> saved_state;
  torch::optim::detail::serialize<State>(state_archive, saved_state);
  std::vector<std::pair<std::vector<std::string>, std::unique_ptr<torch::optim::OptimizerOptions>>> saved_groups;
  torch::optim::detail::serialize<Options>(groups_archive, saved_groups);
  auto& groups = optimizer.param_groups();
  if (saved_groups.size() != groups.size())
    throw InvalidArgument(fmt::format("the optimizer's archive has {} parameter groups, but the optimizer has {}",
                                      saved_groups.size(), groups.size()));
  std::vector<std::vector<at::Tensor>> parameters;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    parameters.push_back(distinct_parameters(std::as_const(groups)[g].params()));
    std::vector<std::string> keys;
    for (std::string& key : saved_groups[g].first) {
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(std::move(key));
    }
    if (keys.size() != parameters[g].size())
      throw InvalidArgument(
          fmt::format("group {} of the optimizer's archive has {} parameters, but the optimizer's group has {}", g,
                      keys.size(), parameters[g].size()));
    saved_groups[g].first = std::move(keys);
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t i = 0; i < parameters[g].size(); ++i) {
      // LibTorch's keys are the addresses that the parameters had when saved.
      const auto found = saved_state.find(reinterpret_cast<void*>(std::stoull(saved_groups[g].first[i])));
      if (found != saved_state.end())
        optimizer.state()[parameters[g][i].unsafeGetTensorImpl()] = std::move(found->second);
    }
    groups[g].set_options(std::move(saved_groups[g].second));
    torch::serialize::InputArchive group_archive, options_archive;
    groups_archive.read("param_groups/" + std::to_string(g), group_archive);
    group_archive.read("options", options_archive);
    c10::IValue rate;
    if (options_archive.try_read("initial_lr", rate)) set_initial_rate(groups[g], rate.toDouble());
  }
}

/// Calls read_archive() for an optimizer of torch::optim. Returns false for other types.
bool read_known_archive(torch::serialize::InputArchive& archive, torch::optim::Optimizer& optimizer);

}  // namespace ddpkit::optim
