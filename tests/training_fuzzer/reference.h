// One process without ddpkit plays all ranks: a model and an optimizer of LibTorch's for each, gradients averaged by
// hand. reference.cpp carries out the events, reference_gradients.cpp has forward, backward and what changes gradients.
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

/// Not copy_(): as if nobody had written to the tensor, which autograd must not object to.
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

  /// Everybody starts from rank 0's weights and buffers.
  void wrap();
  void make_optimizers();
  void set_rates();
  void share_buffers(std::size_t source);
  /// Whatever the options say.
  void copy_buffers(std::size_t source);
  /// Layer by layer in step, since sync_batch_norm sees all ranks' inputs. Undefined for ranks that are not active.
  Outputs forward(const std::vector<bool>& active, const Event& event);
  void normalise_together(std::size_t node, Outputs& x, const std::vector<Batch>& batches);
  void backward(const Outputs& losses, bool retain);
  /// Each element with an error of `relative` size and a drawn sign, which its gradient gets too.
  at::Tensor disturbed(const at::Tensor& x, double relative);
  /// Ranks without a gradient give zeros; where none has one there is none.
  void average(std::int64_t divisor);
  static std::vector<at::Tensor> averaged(Model& model);
  void drop_gradients();
  void clip(const Event& event);
  bool overflowed();
  /// An update within backward leaves only the count to step().
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
  std::map<int, Outputs> graphs_;  ///< Losses by slot.
  std::uint32_t event_ = 0;
  int batch_ = 0;
  std::int64_t steps_ = 0;
  double norm_ = 0;
  double scale_;
  bool has_gradients_ = false;  ///< Averaged ones, for a step.
};

}  // namespace ddpkit::fuzz
