// Tier 2: torch/nn/module.h. A module's replicas.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parallel/dp/gradient_sum.h"
#include "parallel/dp/replica_handles.h"

namespace ddpkit {

/// Clones of a module with separate leaf tensors as parameters, each with a separate gradient. On the module's device,
/// the parameters share the module's memory, so an update of the module updates all replicas. Replicas on another
/// device share a copy, which follow() updates. Replica 0 has the module's buffers, other replicas have copies.
class Replicas {
 public:
  /// `devices` [replica] and `streams` must outlive it. Throws InvalidArgument if the module is not on the first
  /// device, cannot be cloned, or differs from its clone.
  Replicas(std::shared_ptr<torch::nn::Module> module, const std::vector<c10::Device>& devices,
           const ReplicaStreams& streams, std::size_t first_bucket_bytes, std::size_t bucket_bytes);

  torch::nn::Module& module(std::size_t replica) const { return *replicas_[replica]; }
  /// The module's parameters that require a gradient. [param]
  const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  GradientSum& gradients() const noexcept { return *gradients_; }

  /// Copies changes of the module: memory, training mode, and buffer values if `buffers`. Returns false if the replicas
  /// cannot follow (another type, shape or requires_grad): then a new set is needed.
  bool follow(bool buffers);

 private:
  void add_rows(const char* kind, const torch::OrderedDict<std::string, at::Tensor>& sources, c10::Device device);
  void add_replica(c10::Device device);
  void match_sources(c10::Device device);
  void share_memory(const at::Tensor& copy, const at::Tensor& source) const;
  void follow_training_mode();

  std::shared_ptr<torch::nn::Module> module_;
  std::vector<std::shared_ptr<torch::nn::Module>> parts_;     ///< The module and its descendants. [part]
  std::vector<std::size_t> leader_;                           ///< The first replica of the same device. [replica]
  std::vector<std::shared_ptr<torch::nn::Module>> replicas_;  ///< [replica]
  std::vector<std::vector<std::shared_ptr<torch::nn::Module>>> copies_;  ///< Of the parts. [replica][part]
  std::vector<ReplicaRow> rows_;                                         ///< Parameters, then buffers.
  std::vector<at::Tensor> parameters_;
  std::unique_ptr<GradientSum> gradients_;
};

}  // namespace ddpkit
