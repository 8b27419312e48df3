#include "parallel/dp/replicas.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <fmt/ostream.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include <ddpkit/error.h>

namespace ddpkit {
namespace {

std::vector<std::string> names_of_parts(const torch::nn::Module& module) {
  auto names = module.named_modules().keys();
  names[0] = module.name();
  return names;
}

/// Returns the innermost part of the module that cannot be cloned, and what to do.
std::string why_not_cloneable(const torch::nn::Module& module) {
  const auto names = names_of_parts(module);
  const auto parts = module.modules();
  std::size_t culprit = 0;
  std::string reason;
  for (std::size_t i = parts.size(); i-- > 0 && reason.empty();) {
    try {
      parts[i]->clone();
    } catch (const c10::Error& error) {
      culprit = i;
      reason = error.what_without_backtrace();
    }
  }
  const bool is_list = parts[culprit]->as<torch::nn::ParameterList>() || parts[culprit]->as<torch::nn::ParameterDict>();
  return fmt::format(
      "DataParallel clones its module, and the part {} cannot be cloned: {}. LibTorch reports: {}", names[culprit],
      is_list
          ? "LibTorch clones neither ParameterList nor ParameterDict. Call register_parameter() for each parameter, "
            "in reset() of the module that uses it, or use DistributedDataParallel, which does not clone"
          : "derive it from torch::nn::Cloneable<...> and register everything in reset()",
      reason);
}

std::shared_ptr<torch::nn::Module> clone_of(const torch::nn::Module& module, c10::Device device) {
  try {
    return device.is_cpu() ? module.clone() : module.clone(device);
  } catch (const c10::Error&) {
    throw InvalidArgument(why_not_cloneable(module));
  }
}

/// Restores the caller's random state when the result is destroyed. clone() initializes weights before it overwrites
/// them, and random numbers must not depend on the number of clones.
auto keep_random_state() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return c10::make_scope_exit([generator, state = generator.get_state()]() mutable {
    const std::lock_guard lock_of_restore(generator.mutex());
    generator.set_state(state);
  });
}

void check_source(const std::string& name, const at::Tensor& source, c10::Device device) {
  if (source.device() != device)
    throw InvalidArgument(
        fmt::format("DataParallel's first replica is on {}, but {} is on {}: move the module there first, or name its "
                    "device first",
                    device.str(), name, source.device().str()));
  if (source.layout() != at::kStrided)
    throw InvalidArgument(fmt::format("DataParallel cannot replicate {}: its layout is {}; make the tensor dense", name,
                                      fmt::streamed(source.layout())));
  if (source.requires_grad() && !source.is_leaf())
    throw InvalidArgument(fmt::format(
        "DataParallel cannot replicate {}: it is the result of an operator that autograd recorded; register a leaf "
        "tensor, or compute it in forward()",
        name));
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() &&
         a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

bool same_kind(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device() && a.sizes() == b.sizes() &&
         a.requires_grad() == b.requires_grad();
}

std::uint32_t version_of(const at::Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

}  // namespace

Replicas::Replicas(std::shared_ptr<torch::nn::Module> module, const std::vector<c10::Device>& devices,
                   const ReplicaStreams& streams, std::size_t first_bucket_bytes, std::size_t bucket_bytes)
    : module_(std::move(module)), parts_(module_->modules()) {
  for (const c10::Device& device : devices)
    leader_.push_back(static_cast<std::size_t>(std::find(devices.begin(), devices.end(), device) - devices.begin()));
  add_rows("parameter", module_->named_parameters(), devices[0]);
  add_rows("buffer", module_->named_buffers(), devices[0]);
  const auto random_state = keep_random_state();
  for (const c10::Device& device : devices) add_replica(device);
  match_sources(devices[0]);

  std::vector<std::vector<at::Tensor>> leaves(devices.size());
  std::set<std::vector<const void*>> seen;  // Weights that are tied in the clones too are one parameter.
  for (const ReplicaRow& row : rows_) {
    std::vector<const void*> identity;
    for (const at::Tensor& copy : row.copies) {
      copy.requires_grad_(row.source.requires_grad());
      identity.push_back(copy.unsafeGetTensorImpl());
    }
    if (!row.source.requires_grad() || !seen.insert(identity).second) continue;
    parameters_.push_back(row.source);
    for (std::size_t r = 0; r < devices.size(); ++r) leaves[r].push_back(row.copies[r]);
  }
  const auto make_sum = streams.used() ? make_device_gradient_sum : make_cpu_gradient_sum;
  gradients_ = make_sum(std::move(leaves), streams, first_bucket_bytes, bucket_bytes);
  follow(true);
}

void Replicas::add_rows(const char* kind, const torch::OrderedDict<std::string, at::Tensor>& sources,
                        c10::Device device) {
  for (const auto& item : sources) {
    check_source(fmt::format("{} {}", kind, item.key()), item.value(), device);
    rows_.push_back({.kind = kind, .name = item.key(), .source = item.value()});
  }
}

void Replicas::add_replica(c10::Device device) {
  const auto& replica = replicas_.emplace_back(clone_of(*module_, device));
  if (copies_.emplace_back(replica->modules()).size() != parts_.size())
    throw InvalidArgument(
        fmt::format("DataParallel: the clone of {} has {} modules in it, the original {}: register submodules in "
                    "reset(), not in the constructor",
                    module_->name(), copies_.back().size(), parts_.size()));
  const auto parameters = replica->named_parameters(), buffers = replica->named_buffers();
  for (ReplicaRow& row : rows_) {
    const at::Tensor* const copy = (row.is_buffer() ? buffers : parameters).find(row.name);
    if (!copy || copy->sizes() != row.source.sizes())
      throw InvalidArgument(fmt::format(
          "DataParallel: {} {} [{}] of {} is not the same in its clone: register it in reset(), with the same sizes",
          row.kind, row.name, fmt::join(row.source.sizes(), ", "), module_->name()));
    if (copy->is_same(row.source) && copy->requires_grad())
      throw InvalidArgument(
          fmt::format("DataParallel cannot replicate {} {}: clone() returns a module with the same "
                      "tensor, so replicas would add to one gradient",
                      row.kind, row.name));
    row.copies.push_back(*copy);
  }
}

void Replicas::match_sources(c10::Device device) {
  auto scratch = clone_of(*module_, device)->modules();
  match_handles(
      {.names = names_of_parts(*module_), .original = parts_, .clone = copies_[0], .scratch = std::move(scratch)},
      rows_);
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    while (!rows_[rows_[i].first].source.is_same(rows_[i].source)) ++rows_[i].first;
  }
}

void Replicas::share_memory(const at::Tensor& copy, const at::Tensor& source) const {
  if (same_memory(copy, source)) return;
  at::Tensor(copy).set_data(source.variable_data());
  // Shared version counter: the replicas' graphs also detect a weight update between forward and backward.
  torch::autograd::impl::set_version_counter(copy, torch::autograd::impl::version_counter(source));
}

bool Replicas::follow(bool buffers) {
  const at::NoGradGuard no_grad;
  for (const ReplicaRow& row : rows_)
    if (!same_kind(row.source, row.copies[0])) return false;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    ReplicaRow& row = rows_[i];
    // The graphs of earlier forward passes read the copies. They detect a change if the module's graph would detect it.
    const std::uint32_t before = std::exchange(row.version, version_of(row.source));
    const bool changed = before != row.version;
    for (std::size_t r = 0; r < row.copies.size(); ++r) {
      const at::Tensor& copy = row.copies[r];
      const std::size_t leader = !row.is_buffer() ? leader_[r] : r;
      if (leader == 0) {
        share_memory(copy, row.source);
      } else if (row.first != i) {
        share_memory(copy, rows_[row.first].copies[r]);
      } else if (leader != r) {
        share_memory(copy, row.copies[leader]);
      } else if (buffers || !row.is_buffer()) {
        copy.variable_data().copy_(row.source, /*non_blocking=*/true);
        if (changed) torch::autograd::impl::bump_version(copy);
      }
    }
  }
  follow_training_mode();
  return true;
}

void Replicas::follow_training_mode() {
  for (const auto& copies : copies_) {
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      if (copies[i]->is_training() == parts_[i]->is_training()) continue;
      // train() also sets the mode of all submodules. Submodules come later in the list and are set again.
      for (std::size_t k = 0; k < parts_.size(); ++k) copies[k]->train(parts_[k]->is_training());
      break;
    }
  }
}

}  // namespace ddpkit
