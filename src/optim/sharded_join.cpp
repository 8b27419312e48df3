// Within join() ranks that have run out of inputs still update their slices, as the programs of the others say.
#include <torch/serialize/archive.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "optim/shards.h"
#include "parallel/join_session.h"

namespace ddpkit::optim {

const ProcessGroup& ShardedOptimizerBase::join_group() const { return shards_->group; }

void ShardedOptimizerBase::join_begin(JoinSession& session, int index) {
  join_ = &session;
  join_index_ = index;
}

void ShardedOptimizerBase::join_shadow(int event) {
  if (event == Shards::kClip) {
    clip_together({0, 2, 0});
  } else {
    step_together(1);
  }
}

void ShardedOptimizerBase::join_end(int source) {
  join_ = nullptr;
  if (source < 0) return;
  const ProcessGroup& group = shards_->group;
  const std::string bytes = group.all_gather_bytes(settings({}))[static_cast<std::size_t>(source)];
  if (group.rank() != source) take_settings(bytes);
}

void ShardedOptimizerBase::announce(int event) {
  if (join_) return join_->announce(join_index_, event);
  if (JoinSession::running(shards_->group))
    throw InvalidArgument(
        "a ShardedOptimizer calls collectives: pass it to join() with the DistributedDataParallel, "
        "join({ddp, optimizer}, loop)");
}

/// Collective. Within join(), after a rank has run out of inputs: such ranks take what the programs of the others have
/// set since. `arguments`: of the call that the others make; returns theirs on all ranks.
std::vector<double> ShardedOptimizerBase::follow_active_ranks(std::vector<double> arguments) {
  Shards& shards = *shards_;
  if (!join_ || join_->active() == shards.group.world_size()) {
    shards.dropped = false;
    return arguments;
  }
  const bool active = JoinSession::running(shards.group) != nullptr;
  const auto source = static_cast<std::size_t>(join_->first_active(active));
  const std::string bytes = shards.group.all_gather_bytes(active ? settings(arguments) : std::string())[source];
  shards.dropped = false;
  return active ? arguments : take_settings(bytes);
}

std::string ShardedOptimizerBase::settings(const std::vector<double>& arguments) const {
  torch::serialize::OutputArchive archive;
  archive.write("arguments", c10::IValue(arguments));
  // zero_grad() through a torch::optim::Optimizer& does not set `dropped`, but leaves no gradient.
  const bool none = std::none_of(shards_->slices.begin(), shards_->slices.end(),
                                 [](const at::Tensor& slice) { return slice.grad().defined(); });
  archive.write("dropped", c10::IValue(shards_->dropped || none));
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    torch::serialize::OutputArchive options(archive.compilation_unit());
    param_groups_[g].options().serialize(options);
    archive.write(fmt::format("group{}", g), options);
  }
  std::ostringstream stream;
  archive.save_to(stream);
  return stream.str();
}

/// Returns the arguments.
std::vector<double> ShardedOptimizerBase::take_settings(const std::string& bytes) {
  torch::serialize::InputArchive archive;
  archive.load_from(bytes.data(), bytes.size());
  const auto read = [&](const char* key) {
    c10::IValue value;
    archive.read(key, value);
    return value;
  };
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    torch::serialize::InputArchive options;
    archive.read(fmt::format("group{}", g), options);
    param_groups_[g].options().serialize(options);
  }
  if (read("dropped").toBool()) shards_->drop_gradients();
  return read("arguments").toDoubleVector();
}

}  // namespace ddpkit::optim
