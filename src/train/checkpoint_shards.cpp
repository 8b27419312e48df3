#include "train/checkpoint_shards.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>
#include <ddpkit/optim/clip_grad_norm.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/train/optimizer_state.h>
#include <ddpkit/train/state_dict.h>
#include <ddpkit/train/together.h>

#include "optim/shards.h"
#include "parallel/sharding/parameter_shards.h"
#include "tensor/tensor_memory.h"

namespace ddpkit::train {
namespace {

namespace fs = std::filesystem;

constexpr const char* kShardFormat = "ddpkit checkpoint shard 1";

fs::path folder_of(const fs::path& path) { return path.parent_path() / (path.stem().string() + ".shards"); }

optim::Shards* shards_of(const torch::optim::Optimizer& optimizer) {
  const auto* sharded = dynamic_cast<const optim::ShardedOptimizerBase*>(&optimizer);
  return sharded ? &optim::Shards::of(*sharded) : nullptr;
}

StateList as_list(at::IntArrayRef numbers) { return StateList(numbers.begin(), numbers.end()); }

std::vector<std::int64_t> as_numbers(const StateValue& list) {
  std::vector<std::int64_t> numbers;
  for (const StateValue& number : list.to_items()) numbers.push_back(number.to_int());
  return numbers;
}

/// Calls `body(name, parameter)` once per parameter, also if it has several names.
template <class Body>
void for_each_parameter(const torch::nn::Module& module, const Body& body) {
  std::set<const void*> seen;
  for (const auto& item : module.named_parameters())
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) body(item.key(), item.value());
}

/// A part of a tensor's elements in memory order.
struct Range {
  std::int64_t begin = 0, count = 0;
};

/// A rank's file. Python reads it with torch.load().
StateDict shard_of(const torch::nn::Module& module, optim::Shards& shards) {
  const at::NoGradGuard no_grad;
  StateDict parameters;
  for_each_parameter(module, [&](const std::string& name, const at::Tensor& parameter) {
    parameters[name] = StateDict{{"sizes", as_list(parameter.sizes())},
                                 {"strides", as_list(parameter.strides())},
                                 {"begin", shards.sharded->range(parameter).in_tensor},
                                 {"values", shards.sharded->piece(parameter).clone()}};
  });
  StateList names;  // In the order of the optimizer's state.
  for (const auto& group : shards.group_of)
    for (const std::size_t index : group) names.emplace_back(shards.parameters[index].name);
  const auto lent = shards.lend_groups();
  return {{"format", kShardFormat},
          {"parameters", std::move(parameters)},
          {"optimizer", optimizer_state(*shards.inner)},
          {"optimizer_parameters", std::move(names)}};
}

/// Part of a tensor that is assembled from the files.
struct Assembled {
  Range range;
  at::Tensor values = {};                              ///< The range's elements.
  std::int64_t filled = 0;                             ///< Elements that the files had so far.
  std::vector<std::int64_t> sizes = {}, strides = {};  ///< Of the whole tensor.

  void add(const at::Tensor& part, std::int64_t part_begin) {
    if (!values.defined()) values = at::empty({range.count}, part.options());
    const std::int64_t begin = std::max(range.begin, part_begin);
    const std::int64_t end = std::min(range.begin + range.count, part_begin + part.numel());
    if (begin >= end) return;
    values.narrow(0, begin - range.begin, end - begin).copy_(part.narrow(0, begin - part_begin, end - begin));
    filled += end - begin;
  }
  bool is_complete() const { return values.defined() && filled == range.count; }
  /// Only if the range is the whole tensor.
  at::Tensor whole() const {
    const at::Tensor tensor = at::empty_strided(sizes, strides, values.options());
    in_order(tensor).copy_(values);
    return tensor;
  }
};

class Reader {
 public:
  Reader(std::string path, const torch::nn::Module& module, torch::optim::Optimizer& optimizer)
      : path_(std::move(path)), optimizer_(optimizer), shards_(shards_of(optimizer)) {
    sharded_ = shards_ && shards_->sharded && shards_->sharded->try_release() ? shards_->sharded.get() : nullptr;
    for_each_parameter(module, [&](const std::string& name, const at::Tensor& parameter) {
      Range range{0, parameter.numel()};
      if (sharded_) range = {sharded_->range(parameter).in_tensor, sharded_->range(parameter).count};
      parameters_[name] = {parameter, {.range = range}};
    });
    find_state_ranges();
  }

  void add(const fs::path& file) {
    const StateValue read = load_state_dict(file);
    const StateDict& shard = read.to_dict();
    const StateValue* format = shard.find("format");
    if (!format || !format->get_if<std::string>() || format->to_string() != kShardFormat)
      throw InvalidArgument(fmt::format("{} is not a part of a checkpoint that this version wrote", file.string()));
    const StateDict& parameters = shard.at("parameters").to_dict();
    for (const StateItem& item : parameters) add_parameter(std::get<std::string>(item.key), item.value.to_dict());
    std::vector<const StateDict*> parts;  // [index in the optimizer's state]
    for (const StateValue& name : shard.at("optimizer_parameters").to_items())
      parts.push_back(&parameters.at(name.to_string()).to_dict());
    add_state(shard.at("optimizer").to_dict(), parts);
  }

  /// Returns whether no other file is needed.
  bool is_complete() const {
    return std::all_of(parameters_.begin(), parameters_.end(),
                       [](const auto& item) { return item.second.second.is_complete(); }) &&
           std::all_of(state_tensors_.begin(), state_tensors_.end(),
                       [](const auto& item) { return item.second.is_complete(); });
  }
  void check_complete() const {
    for (const auto& [name, parameter] : parameters_)
      if (!parameter.second.is_complete()) refuse(fmt::format("it has no {}, or only a part", name));
    if (!is_complete()) refuse("it has only a part of the optimizer's state");
  }

  void put_parameters() {
    const at::NoGradGuard no_grad;
    for (auto& [name, entry] : parameters_) {
      auto& [parameter, read] = entry;
      if (sharded_)
        sharded_->piece(parameter).copy_(read.values);
      else
        parameter.copy_(read.whole());
    }
  }

  void put_optimizer() {
    StateDict states;
    for (auto& [index, state] : states_) {
      for (const auto& [key, tensor] : state_tensors_)
        if (key.first == index) state[key.second] = shards_ ? tensor.values : tensor.whole();
      states[index] = std::move(state);
    }
    const StateDict state{{"state", std::move(states)}, {"param_groups", groups_}};
    if (!shards_) return load_optimizer_state(optimizer_, state);
    shards_->check_groups();
    shards_->consolidated.reset();
    const auto lent = shards_->lend_groups();
    load_optimizer_state(*shards_->inner, state);
  }

 private:
  /// The optimizer's state is numbered through the groups.
  void find_state_ranges() {
    if (shards_) {
      for (const auto& group : shards_->group_of)
        for (const std::size_t index : group)
          state_ranges_.push_back({shards_->places[index].own.in_tensor, shards_->places[index].own.count});
      return;
    }
    for (const auto& group : std::as_const(optimizer_).param_groups())
      for (const at::Tensor& parameter : optim::distinct_parameters(group.params()))
        state_ranges_.push_back({0, parameter.numel()});
  }

  [[noreturn]] void refuse(const std::string& difference) const {
    throw InvalidArgument(fmt::format("the checkpoint {} is of another model: {}", path_, difference));
  }
  [[noreturn]] void refuse_shape(const std::string& name, at::IntArrayRef there, const at::Tensor& here) const {
    refuse(fmt::format("{} is [{}] there and [{}] here", name, fmt::join(there, ", "), fmt::join(here.sizes(), ", ")));
  }

  void add_parameter(const std::string& name, const StateDict& part) {
    const auto found = parameters_.find(name);
    if (found == parameters_.end()) refuse(fmt::format("its {} is not here", name));
    auto& [parameter, read] = found->second;
    read.sizes = as_numbers(part.at("sizes"));
    read.strides = as_numbers(part.at("strides"));
    const at::Tensor& values = part.at("values").to_tensor();
    if (parameter.sizes() != at::IntArrayRef(read.sizes)) refuse_shape(name, read.sizes, parameter);
    const at::ScalarType here = sharded_ ? sharded_->piece(parameter).scalar_type() : parameter.scalar_type();
    if (values.scalar_type() != here)
      refuse(fmt::format("{} is {} there and {} here", name, c10::toString(values.scalar_type()), c10::toString(here)));
    if (sharded_ && parameter.strides() != at::IntArrayRef(read.strides))
      refuse(fmt::format("{} has the strides [{}] there and [{}] here", name, fmt::join(read.strides, ", "),
                         fmt::join(parameter.strides(), ", ")));
    read.add(values, part.at("begin").to_int());
  }

  void add_state(const StateDict& optimizer, const std::vector<const StateDict*>& parts) {
    if (parts.size() != state_ranges_.size())
      refuse(fmt::format("its optimizer has {} parameters, and the one here {}", parts.size(), state_ranges_.size()));
    groups_ = optimizer.at("param_groups");
    for (const StateItem& item : optimizer.at("state").to_dict()) {
      const auto index = std::get<std::int64_t>(item.key);
      StateDict& state = states_[index];
      for (const StateItem& entry : item.value.to_dict()) {
        const auto* tensor = entry.value.get_if<at::Tensor>();
        if (!tensor || tensor->dim() != 1) {
          state[entry.key] = entry.value;  // The number of steps, the same on all ranks.
          continue;
        }
        const StateDict& part = *parts.at(static_cast<std::size_t>(index));
        Assembled& read = state_tensors_[{index, std::get<std::string>(entry.key)}];
        read.range = state_ranges_[static_cast<std::size_t>(index)];
        read.sizes = as_numbers(part.at("sizes"));
        read.strides = as_numbers(part.at("strides"));
        read.add(*tensor, part.at("begin").to_int());
      }
    }
  }

  std::string path_;
  torch::optim::Optimizer& optimizer_;
  optim::Shards* shards_;               ///< Null if the optimizer has whole parameters.
  ParameterShards* sharded_ = nullptr;  ///< Null if the parameters are whole.
  std::map<std::string, std::pair<at::Tensor, Assembled>> parameters_;
  std::vector<Range> state_ranges_;  ///< [index in the optimizer's state]
  std::map<std::int64_t, StateDict> states_;
  std::map<std::pair<std::int64_t, std::string>, Assembled> state_tensors_;
  StateValue groups_;
};

}  // namespace

ParameterShards* parameter_shards_of(const torch::optim::Optimizer& optimizer) {
  const optim::Shards* shards = shards_of(optimizer);
  return shards ? shards->sharded.get() : nullptr;
}

std::vector<std::string> write_shards(const fs::path& path, const torch::nn::Module& module,
                                      const torch::optim::Optimizer& optimizer, std::int64_t step,
                                      const ProcessGroup& group) {
  // A new name each time: the files of the previous checkpoint stay until the index of this one is on the disk.
  const std::string token = broadcast_bytes(group, fmt::format("{}-{:08x}", step, std::random_device()()));
  const fs::path folder = folder_of(path);
  optim::Shards* shards = shards_of(optimizer);
  const int files = shards ? shards->group.world_size() : 0;  // The first replica writes, if there are several.
  std::vector<std::string> names;
  for (int rank = 0; rank < files; ++rank)
    names.push_back((folder.filename() / fmt::format("{}-{}.pt", token, rank)).string());
  run_together(group, [&] {
    if (!shards || !shards->sharded)
      throw InvalidArgument(
          "a sharded checkpoint needs the ShardedOptimizer of a FullyShardedDataParallel: set `sharded` of "
          "CheckpointOptions to false");
    if (!shards->sharded->try_release())
      throw InvalidArgument("end the scope of whole() before a sharded checkpoint is saved");
    std::error_code error;
    fs::create_directories(folder, error);
    if (error) throw Error(fmt::format("cannot make the folder {}: {}", folder.string(), error.message()));
    if (group.rank() < files)
      save_state_dict(path.parent_path() / names[static_cast<std::size_t>(group.rank())], shard_of(module, *shards));
  });
  return names;
}

ShardsToRestore read_shards(const fs::path& path, const std::vector<std::string>& names, torch::nn::Module& module,
                            torch::optim::Optimizer& optimizer, int rank, int world_size) {
  const auto reader = std::make_shared<Reader>(path.string(), module, optimizer);
  try {
    // Files of other shards come last, and are not read if nothing is missing.
    const auto files = static_cast<std::int64_t>(names.size());
    const std::int64_t first = rank * files / world_size;
    for (std::int64_t i = 0; i < files && !reader->is_complete(); ++i)
      reader->add(path.parent_path() / names[static_cast<std::size_t>((first + i) % files)]);
    reader->check_complete();
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    throw InvalidArgument(fmt::format("the checkpoint {} is damaged: its parts do not fit together", path.string()));
  }
  return {.put_parameters = [reader] { reader->put_parameters(); },
          .put_optimizer = [reader] { reader->put_optimizer(); }};
}

void check_shards(const fs::path& path, const std::vector<std::string>& names) {
  for (const std::string& name : names) (void)load_state_dict(path.parent_path() / name);
}

void remove_other_shards(const fs::path& path, const std::vector<std::string>& names) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_of(path), error)) {
    const std::string name = (folder_of(path).filename() / entry.path().filename()).string();
    std::error_code ignored;
    if (std::find(names.begin(), names.end(), name) == names.end()) fs::remove(entry.path(), ignored);
  }
}

}  // namespace ddpkit::train
