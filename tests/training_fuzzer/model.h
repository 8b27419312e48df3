// A module that interprets the nodes of a case, so that cases need no compilation.
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

/// The batch of one rank's forward. All elements differ, also between ranks and steps.
struct Batch {
  at::Tensor x;             ///< [rows, width]
  at::Tensor index;         ///< [rows], for embeddings.
  at::Tensor mask;          ///< [rows, width]
  at::Tensor coefficients;  ///< [rows, width], coefficients of the loss.
  int step = 0;
  int rank = 0;
};
Batch map_tensors(const Batch& batch, const TensorMap& map);
Batch make_batch(const Case& drawn, int number, int rank);
at::Tensor loss_of(const Case& drawn, const at::Tensor& output, const Batch& batch);

/// The same output tensor in another type.
struct AsTuple {};
struct AsMap {};
struct AsOpaque {};
struct Opaque {
  at::Tensor value;
};

class Model : public torch::nn::Cloneable<Model> {
 public:
  /// Builds the model as rank `rank` does. `group`: the ranks of sync_batch_norm; empty: plain batch norm. The
  /// reference does not checkpoint, and its embeddings have dense gradients.
  Model(const Case& drawn, int rank, std::optional<ProcessGroup> group, bool is_reference);
  void reset() override;

  /// Converts the model and later inputs to this type.
  void cast(at::ScalarType dtype) {
    to(dtype);
    input_type_ = dtype;
  }
  /// Requires a gradient, so that each rank has a backward, whatever parts of the model it uses.
  at::Tensor input(const Batch& batch) const { return wanting_gradient(batch.x.to(input_type_)); }
  /// Requires a gradient too: all layers of this rank after a detached input may be frozen.
  static at::Tensor output(const at::Tensor& x) { return wanting_gradient(x); }
  at::Tensor forward(const Batch& batch);
  std::tuple<int, std::vector<at::Tensor>> forward(const Batch& batch, AsTuple) { return {1, {forward(batch)}}; }
  std::map<std::string, at::Tensor> forward(const Batch& batch, AsMap) { return {{"output", forward(batch)}}; }
  Opaque forward(const Batch& batch, AsOpaque) { return {forward(batch)}; }
  /// The exception that a case throws and the program catches.
  struct Thrown : std::runtime_error {
    Thrown() : std::runtime_error("thrown by the case") {}
  };
  /// Runs node `index` alone, with as many applications as in a forward.
  at::Tensor run(std::size_t index, at::Tensor x, const Batch& batch);

  /// Returns the node's parameters, the main parameter first.
  std::vector<at::Tensor> parameters_of(std::size_t index) const;
  /// Each parameter once, also if it has several names.
  std::vector<at::Tensor> distinct_parameters() const;
  /// Returns the names of parameters and buffers of ignored nodes.
  std::vector<std::string> ignored_names() const;
  /// Changes the layout of the node's main parameter without changing its values.
  void set_layout(std::size_t index, const std::string& layout);
  /// The next forward throws at its end, or its graph throws before the gradients of the nodes up to `node`.
  void throw_next_in_forward() { throws_in_forward_ = true; }
  void throw_next_in_backward(std::size_t node) { throws_in_backward_ = node; }
  /// Keeps the gradients in `held`, like a program that needs them after zero_grad().
  void hold_gradients();
  std::map<std::string, at::Tensor> held;  ///< By the parameter's name.
  /// The tensor that parameters of the layout "flat" are views of; undefined if there are none.
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
  std::vector<std::shared_ptr<torch::nn::Module>> children_of_;  ///< Null if a node has its own parameter. [node]
  std::vector<at::Tensor> own_;                                  ///< [node]
};

at::ScalarType type_named(const std::string& name);

}  // namespace ddpkit::fuzz
