#include "parallel/replica_set.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include <ddpkit/comm/error.h>

namespace ddpkit {
namespace {

std::string type_of(const torch::nn::Module& module) { return module.name(); }

std::shared_ptr<torch::nn::Module> clone_of(const torch::nn::Module& module, c10::Device device) {
  // clone() initialises weights before it overwrites them: the caller's random numbers shall not depend on how many
  // replicas there are.
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const auto state = [&] {
    const std::lock_guard lock(generator.mutex());
    return generator.get_state();
  }();
  std::shared_ptr<torch::nn::Module> clone;
  try {
    clone = device.is_cpu() ? module.clone() : module.clone(device);
  } catch (const c10::Error& error) {
    throw InvalidArgument(
        fmt::format("DataParallel clones its module, and {} or a part of it cannot be cloned: derive it from "
                    "torch::nn::Cloneable<...> and register everything in reset(). LibTorch says: {}",
                    type_of(module), error.what_without_backtrace()));
  }
  {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
  return clone;
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() &&
         a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

bool same_kind(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device() && a.sizes() == b.sizes();
}

}  // namespace

ReplicaSet::ReplicaSet(std::shared_ptr<torch::nn::Module> module, const std::vector<c10::Device>& devices,
                       const ReplicaStreams& streams, std::size_t first_bucket_bytes, std::size_t bucket_bytes)
    : module_(std::move(module)), copies_(devices.size()) {
  const std::size_t count = devices.size();
  for (const c10::Device& device : devices)
    leader_.push_back(static_cast<std::size_t>(std::find(devices.begin(), devices.end(), device) - devices.begin()));
  for (const auto& item : module_->named_parameters()) {
    if (item.value().device() != devices[0])
      throw InvalidArgument(
          fmt::format("DataParallel's first replica is on {}, but parameter {} is on {}: move the module there first, "
                      "or name its device first",
                      devices[0].str(), item.key(), item.value().device().str()));
  }
  for (const auto& part : module_->modules()) parts_.push_back(part.get());
  for (std::size_t r = 0; r < count; ++r) {
    replicas_.push_back(clone_of(*module_, devices[r]));
    copies_[r] = replicas_[r]->modules();
    if (copies_[r].size() != parts_.size())
      throw InvalidArgument(
          fmt::format("DataParallel: the clone of {} has {} modules in it, the original {}: register "
                      "submodules in reset(), not in the constructor",
                      type_of(*module_), copies_[r].size(), parts_.size()));
  }
  all_parameters_ = rows(module_->named_parameters(), true);
  buffers_ = rows(module_->named_buffers(), false);

  std::vector<std::vector<at::Tensor>> leaves(count);
  std::set<std::vector<const void*>> seen;  // Weights tied in the clones too are one parameter.
  for (const Row& row : all_parameters_) {
    std::vector<const void*> identity;
    for (const at::Tensor& copy : row.copies) {
      copy.requires_grad_(row.source.requires_grad());
      identity.push_back(copy.unsafeGetTensorImpl());
    }
    if (!row.source.requires_grad() || !seen.insert(identity).second) continue;
    parameters_.push_back(row.source);
    for (std::size_t r = 0; r < count; ++r) leaves[r].push_back(row.copies[r]);
  }
  gradients_ = std::make_unique<ReplicaGradients>(std::move(leaves), streams, first_bucket_bytes, bucket_bytes);
  follow(true);
}

std::vector<ReplicaSet::Row> ReplicaSet::rows(const torch::OrderedDict<std::string, at::Tensor>& sources,
                                              bool parameters) const {
  std::vector<Row> rows;
  for (const auto& item : sources) rows.push_back({.source = item.value(), .copies = {}});
  for (const auto& replica : replicas_) {
    const auto copies = parameters ? replica->named_parameters() : replica->named_buffers();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::string& name = sources[i].key();
      const at::Tensor* const copy = copies.find(name);
      if (!copy || copy->sizes() != rows[i].source.sizes())
        throw InvalidArgument(fmt::format(
            "DataParallel: {} {} [{}] of {} is not the same in its clone: register it in reset(), with the same sizes",
            parameters ? "parameter" : "buffer", name, fmt::join(rows[i].source.sizes(), ", "), type_of(*module_)));
      rows[i].copies.push_back(*copy);
    }
  }
  return rows;
}

void ReplicaSet::share_memory(const at::Tensor& copy, const at::Tensor& source) const {
  if (same_memory(copy, source)) return;
  at::Tensor(copy).set_data(source.variable_data());
  // A weight that is updated between forward and backward is found out in the replicas' graphs too.
  torch::autograd::impl::set_version_counter(copy, torch::autograd::impl::version_counter(source));
}

bool ReplicaSet::follow(bool buffers) {
  const at::NoGradGuard no_grad;
  for (const auto* rows : {&all_parameters_, &buffers_}) {
    for (const Row& row : *rows) {
      if (!same_kind(row.source, row.copies[0]) || row.source.requires_grad() != row.copies[0].requires_grad())
        return false;
    }
  }
  for (const Row& row : all_parameters_) {
    for (std::size_t r = 0; r < row.copies.size(); ++r) {
      if (leader_[r] == 0)
        share_memory(row.copies[r], row.source);
      else if (leader_[r] != r)
        share_memory(row.copies[r], row.copies[leader_[r]]);
      else
        // Without a new version of it: the graph of an earlier forward is none the worse for getting what it had.
        row.copies[r].variable_data().copy_(row.source, /*non_blocking=*/true);
    }
  }
  for (const Row& row : buffers_) {
    share_memory(row.copies[0], row.source);
    for (std::size_t r = 1; buffers && r < row.copies.size(); ++r)
      at::Tensor(row.copies[r]).copy_(row.source, /*non_blocking=*/true);
  }
  follow_training_mode();
  return true;
}

void ReplicaSet::follow_training_mode() {
  for (const auto& copies : copies_) {
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      if (copies[i]->is_training() == parts_[i]->is_training()) continue;
      // A module's mode is set with that of all below it, which come after it here and are set in their turn.
      for (std::size_t k = 0; k < parts_.size(); ++k) copies[k]->train(parts_[k]->is_training());
      break;
    }
  }
}

}  // namespace ddpkit
