#include <ddpkit/optim/join_state.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <c10/util/Type.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>
#include <ddpkit/optim/sharded_optimizer.h>

#include "comm/joining.h"
#include "optim/state_tensors.h"
#include "parallel/ddp/shard_output.h"
#include "parallel/model_agreement.h"
#include "tensor/tensor_memory.h"

namespace ddpkit::optim {
namespace {

constexpr const char* kCall = "JoinState";

using Names = std::unordered_map<const void*, std::string>;

/// Throws InvalidArgument for a parameter that is not in `averaged`, except a frozen parameter without state.
std::string names_of(const torch::optim::Optimizer& optimizer, const torch::optim::OptimizerParamGroup& group,
                     const Names& averaged) {
  std::vector<std::string> names;
  for (const at::Tensor& parameter : group.params()) {
    auto* key = parameter.unsafeGetTensorImpl();
    const auto found = averaged.find(key);
    if (found == averaged.end() && (parameter.requires_grad() || optimizer.state().count(key) > 0))
      throw InvalidArgument(
          fmt::format("JoinState: DistributedDataParallel does not average a parameter of this optimizer, of sizes "
                      "[{}]: give the parameters that it ignores another optimizer",
                      fmt::join(parameter.sizes(), ", ")));
    names.push_back(found == averaged.end() ? "a frozen tensor" : found->second);
  }
  return fmt::format("({})", fmt::join(names, ", "));
}

}  // namespace

void JoinState::add(torch::optim::Optimizer& optimizer) {
  // Elastic's new ranks get the state of a sharded optimizer by DistributedDataParallel::regroup(); check() refuses it.
  const bool sharded = dynamic_cast<const ShardedOptimizerBase*>(&optimizer) != nullptr;
  parts_.push_back({.save =
                        [&optimizer, sharded](torch::serialize::OutputArchive& archive) {
                          if (!sharded) write_without_tensors(optimizer, archive);
                        },
                    .load =
                        [&optimizer, sharded](torch::serialize::InputArchive& archive) {
                          if (!sharded) read_without_tensors(optimizer, archive);
                        },
                    .type = &typeid(optimizer),
                    .optimizer = &optimizer});
}

void JoinState::check(const DistributedDataParallelBase& ddp) const {
  check_same_on_all_ranks(group_, kCall, [&] {
    Names averaged;
    for (const NamedParameter& parameter : parameters_of(ddp.reducer()))
      averaged.emplace(parameter.tensor.unsafeGetTensorImpl(), parameter.name);
    std::string text;
    for (const Part& part : parts_) {
      if (dynamic_cast<const ShardedOptimizerBase*>(part.optimizer))
        throw InvalidArgument("JoinState: a ShardedOptimizer keeps its state on all ranks; pass it to join() itself");
      text += c10::demangle(part.type->name());
      if (part.optimizer) {
        for (const auto& group : part.optimizer->param_groups())
          text += " of " + names_of(*part.optimizer, group, averaged);
      }
      text += '\n';
    }
    return text;
  });
}

void JoinState::join_end(int source) {
  if (source < 0) return;
  const bool saves = group_.rank() == source;
  copy(saves, !saves, [&](const at::Tensor& tensor) { group_.broadcast(tensor, source); });
}

void JoinState::copy_to_new(int new_ranks) {
  const int former = group_.world_size() - new_ranks;
  copy(group_.rank() < std::min(new_ranks, former), group_.rank() >= former,
       [&](const at::Tensor& tensor) { Joining::copy(group_, new_ranks, tensor); });
}

void JoinState::copy(bool saves, bool loads, const std::function<void(const at::Tensor&)>& transfer) {
  std::string bytes;
  run_on_all_ranks(group_, kCall, [&] {
    if (saves) bytes = save();
  });
  const at::Tensor size = at::full({1}, static_cast<std::int64_t>(bytes.size()), at::kLong).to(group_.device());
  transfer(size);
  const auto length = static_cast<std::size_t>(size.item<std::int64_t>());
  group_.check();
  bytes.resize(length);
  const at::Tensor on_host = at::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, at::kByte);
  const at::Tensor data = on_host.to(group_.device());
  transfer(data);
  run_on_all_ranks(group_, kCall, [&] {
    if (!loads) return;
    on_host.copy_(data);
    auto archives = read(bytes);
    for (std::size_t i = 0; i < parts_.size(); ++i) parts_[i].load(archives[i]);
  });
  for (const Part& part : parts_) {
    if (!part.optimizer) continue;
    for (const at::Tensor& tensor : state_tensors(*part.optimizer)) transfer_bytes(tensor, loads, transfer);
  }
}

void JoinState::prepare() const {
  const std::string bytes = save();
  if (!group_.is_joining()) return;
  read(bytes);
  for (const Part& part : parts_) {
    if (part.optimizer) prepare_state(*part.optimizer);
  }
}

std::string JoinState::save() const {
  torch::serialize::OutputArchive archive;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    torch::serialize::OutputArchive nested(archive.compilation_unit());
    parts_[i].save(nested);
    archive.write(fmt::format("part_{}", i), nested);
  }
  return bytes_of(archive);
}

std::vector<torch::serialize::InputArchive> JoinState::read(const std::string& bytes) const {
  torch::serialize::InputArchive archive;
  archive.load_from(bytes.data(), bytes.size());
  std::vector<torch::serialize::InputArchive> parts(parts_.size());
  for (std::size_t i = 0; i < parts_.size(); ++i) archive.read(fmt::format("part_{}", i), parts[i]);
  return parts;
}

}  // namespace ddpkit::optim
