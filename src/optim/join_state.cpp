#include <ddpkit/optim/join_state.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <torch/serialize/archive.h>

#include <sstream>
#include <string>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/comm/error.h>
#include <ddpkit/optim/optimizer_archive.h>
#include <ddpkit/optim/sharded_optimizer.h>

namespace ddpkit::optim {

void JoinState::add(const DistributedDataParallelBase& ddp, torch::optim::Optimizer& optimizer) {
  if (dynamic_cast<const ShardedOptimizerBase*>(&optimizer))
    throw InvalidArgument("JoinState: a ShardedOptimizer keeps its state on all ranks; pass it to join() itself");
  std::unordered_set<const void*> averaged;
  for (const NamedParameter& parameter : ddp.reducer().parameters())
    averaged.insert(parameter.tensor.unsafeGetTensorImpl());
  for (const auto& group : std::as_const(optimizer).param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.requires_grad() && !averaged.contains(parameter.unsafeGetTensorImpl()))
        throw InvalidArgument(
            fmt::format("JoinState: DistributedDataParallel does not average a parameter of this optimizer, of sizes "
                        "[{}]: give the parameters that it ignores another optimizer",
                        fmt::join(parameter.sizes(), ", ")));
    }
  }
  parts_.push_back(
      {.save = [&optimizer](torch::serialize::OutputArchive& archive) { optimizer.save(archive); },
       .load = [&optimizer](torch::serialize::InputArchive& archive) { load_archive(optimizer, archive); }});
}

void JoinState::join_end(int source) {
  if (source < 0) return;
  const bool own = group_.rank() == source;
  std::string bytes;
  if (own) {
    torch::serialize::OutputArchive archive;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      torch::serialize::OutputArchive nested(archive.compilation_unit());
      parts_[i].save(nested);
      archive.write(fmt::format("part_{}", i), nested);
    }
    std::ostringstream stream;
    archive.save_to(stream);
    bytes = std::move(stream).str();
  }
  const at::Tensor size = at::full({1}, static_cast<std::int64_t>(bytes.size()), at::kLong).to(group_.device());
  group_.broadcast(size, source);
  bytes.resize(static_cast<std::size_t>(size.item<std::int64_t>()));
  const at::Tensor on_host = at::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, at::kByte);
  const at::Tensor data = on_host.to(group_.device());
  group_.broadcast(data, source);
  if (own) return;
  on_host.copy_(data);
  torch::serialize::InputArchive archive;
  archive.load_from(bytes.data(), bytes.size());
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    torch::serialize::InputArchive nested;
    archive.read(fmt::format("part_{}", i), nested);
    parts_[i].load(nested);
  }
}

}  // namespace ddpkit::optim
