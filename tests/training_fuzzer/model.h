// A module that interprets the nodes of a case: no case is compiled.
#pragma once

#include <torch/torch.h>

#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/pytree.h>

#include "case.h"

namespace ddpkit::fuzz {

/// What one rank's forward gets; all elements differ, between ranks and steps too.
struct Batch {
  at::Tensor x;             ///< [rows, width]
  at::Tensor index;         ///< [rows], for embeddings.
  at::Tensor mask;          ///< [rows, width]
  at::Tensor coefficients;  ///< [rows, width], of the loss.
  int step = 0;
  int rank = 0;
};
Batch map_tensors(const Batch& batch, const TensorMap& map);
Batch make_batch(const Case& drawn, int number, int rank);
at::Tensor loss_of(const Case& drawn, const at::Tensor& output, const Batch& batch);

/// What forward returns: the same tensor in another type.
struct AsTuple {};
struct AsMap {};
struct AsOpaque {};
struct Opaque {
  at::Tensor value;
};

class Model : public torch::nn::Cloneable<Model> {
 public:
  /// As rank `rank` builds it. `group`: the ranks that sync_batch_norm spans; empty: plain batch norm. The reference
  /// checkpoints nothing, and its embeddings have dense gradients.
  Model(const Case& drawn, int rank, std::optional<ProcessGroup> group, bool is_reference);
  void reset() override;

  /// From now on it computes in that type.
  void cast(at::ScalarType dtype) {
    to(dtype);
    input_type_ = dtype;
  }
  /// Wants a gradient, so that every rank has a backward whatever it uses of the model.
  at::Tensor input(const Batch& batch) const { return wanting_gradient(batch.x.to(input_type_)); }
  /// Wants a gradient too: all layers of this rank behind a detached input may be frozen.
  static at::Tensor output(const at::Tensor& x) { return wanting_gradient(x); }
  at::Tensor forward(const Batch& batch);
  std::tuple<int, std::vector<at::Tensor>> forward(const Batch& batch, AsTuple) { return {1, {forward(batch)}}; }
  std::map<std::string, at::Tensor> forward(const Batch& batch, AsMap) { return {{"output", forward(batch)}}; }
  Opaque forward(const Batch& batch, AsOpaque) { return {forward(batch)}; }
  /// What the case throws, for the program to catch.
  struct Thrown : std::runtime_error {
    Thrown() : std::runtime_error("thrown by the case") {}
  };
  /// Node `index` alone, as often as a forward uses it.
  at::Tensor run(std::size_t index, at::Tensor x, const Batch& batch);

  /// The node's parameters, the main one first.
  std::vector<at::Tensor> parameters_of(std::size_t index) const;
  /// Each once, whatever its names.
  std::vector<at::Tensor> distinct_parameters() const;
  /// Names of parameters and buffers of ignored nodes.
  std::vector<std::string> ignored_names() const;
  /// Gives the node's main parameter another layout with the same values.
  void set_layout(std::size_t index, const std::string& layout);
  /// The next forward throws at its end, or its graph does before the gradients of the nodes up to `node`.
  void throw_next_in_forward() { throws_in_forward_ = true; }
  void throw_next_in_backward(std::size_t node) { throws_in_backward_ = node; }
  /// Keeps the gradients in `held`, as a program does that needs them after zero_grad().
  void hold_gradients();
  std::map<std::string, at::Tensor> held;  ///< By the parameter's name.
  /// The tensor that parameters of the layout "flat" are views of; undefined without.
  at::Tensor flat;

  const Case& drawn() const { return *drawn_; }

 private:
  static at::Tensor wanting_gradient(const at::Tensor& x) {
    return x.requires_grad() ? x : x.detach().requires_grad_();
  }
  at::Tensor apply(std::size_t index, const at::Tensor& x, const Batch& batch);
  at::Tensor weight(std::size_t index) const;
  void fill();
  void make_flat();

  std::shared_ptr<const Case> drawn_;
  int rank_;
  std::optional<ProcessGroup> group_;
  bool is_reference_;
  at::ScalarType input_type_;
  bool throws_in_forward_ = false;
  std::optional<std::size_t> throws_in_backward_;
  std::vector<std::shared_ptr<torch::nn::Module>> children_of_;  ///< Null where a node has its own parameter. [node]
  std::vector<at::Tensor> own_;                                  ///< [node]
};

at::ScalarType type_named(const std::string& name);

}  // namespace ddpkit::fuzz
