// One process without ddpkit simulates all ranks: each has a model and an optimizer of LibTorch. Gradients are averaged
// directly. reference.cpp executes the events. reference_gradients.cpp has forward, backward and changes of gradients.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "judge.h"
#include "optimizers.h"
#include "training.h"

namespace ddpkit::fuzz {

struct Player {
  std::shared_ptr<Model> model = {};
  std::unique_ptr<torch::optim::Optimizer> optimizer = {};
  Report report = {};
};

/// Writes like copy_(), but without notifying autograd.
inline void overwrite(const at::Tensor& to, const at::Tensor& from) {
  if (to.is_contiguous() && from.is_contiguous()) {
    std::memcpy(to.data_ptr(), from.const_data_ptr(), from.nbytes());
  } else {
    const torch::NoGradGuard no_grad;
    to.copy_(from);
  }
}

class Reference {
 public:
  Reference(const Case& drawn, std::uint64_t run);
  std::vector<Report> run();

 private:
  using Outputs = std::vector<at::Tensor>;  // [rank]

  /// Copies rank 0's weights and buffers to all ranks.
  void wrap();
  void make_optimizers();
  void set_rates();
  void share_buffers(std::size_t source);
  /// Independent of the options.
  void copy_buffers(std::size_t source);
  /// Runs all ranks layer by layer, since sync_batch_norm needs the inputs of all ranks. Undefined for inactive ranks.
  Outputs forward(const std::vector<bool>& active, const Event& event);
  void normalise_together(std::size_t node, Outputs& x, const std::vector<Batch>& batches);
  void backward(const Outputs& losses, bool retain);
  /// Adds an error of `relative` size and random sign to each element, also to its gradient.
  at::Tensor disturbed(const at::Tensor& x, double relative);
  /// Ranks without a gradient contribute zeros. If no rank has a gradient, the result has none.
  void average(std::int64_t divisor);
  static std::vector<at::Tensor> averaged(Model& model);
  void drop_gradients();
  void clip(const Event& event);
  bool overflowed();
  /// If backward updates the weights, step() only counts.
  void step();
  void update();
  void join(const Event& event);
  void perform(const Event& event);
  void perform_throw(const Event& event);
  void report_all(bool gradients, Kind gradient);

  const Case& drawn_;
  Rounding disturbance_;
  at::Generator generator_;
  std::vector<Player> players_;    ///< [rank]
  std::map<int, Outputs> graphs_;  ///< Losses. [slot]
  std::uint32_t event_ = 0;
  int batch_ = 0;
  std::int64_t steps_ = 0;
  double norm_ = 0;
  double scale_;
  bool has_gradients_ = false;  ///< Averaged gradients for a step exist.
};

}  // namespace ddpkit::fuzz
