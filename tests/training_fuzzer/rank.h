// A rank's training under ddpkit.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ddpkit/optim/grad_scaler.h>
#include <ddpkit/optim/learning_rate.h>
#include <ddpkit/parallel/data_parallel.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/parallel/fully_sharded_data_parallel.h>

#include "optimizers.h"
#include "training.h"

namespace ddpkit::fuzz {

/// Executes the events as a program would, with the case's wrapper and optimizer.
class RankTraining {
 public:
  RankTraining(const Case& drawn, int rank, ProcessGroup group, std::string folder);
  /// Wraps the model and creates the optimizer. Collective; may throw.
  void start();
  void perform(std::uint32_t number, const Event& event);
  Report report;

 private:
  using Wrapped = DistributedDataParallel<Model>;
  using FullySharded = FullyShardedDataParallel<Model>;

  void wrap();
  std::unique_ptr<DistributedDataParallelBase> fully_sharded();
  /// In which the program may use the parameters of a FullyShardedDataParallel. `whole`: also if the case has another
  /// scope.
  std::optional<FullySharded::Gathering> scope(bool whole) const;
  void make_optimizer();
  void make_scheduler();
  void set_hook(const std::string& name);

  at::Tensor forward(const Event& event);
  at::Tensor output_of(const Batch& batch);
  template <class Wrapper>
  at::Tensor output_of(Wrapper& wrapper, const Batch& batch);
  void backward(const Event& event);
  void zero(const std::string& how);
  void clip(const Event& event);
  void step();
  void join(const Event& event);
  void throw_within(const Event& event);
  void wrap_again(const std::string& how);
  void copy_model();
  void optimizer_again(const std::string& how);
  void save_load(const std::string& how);
  void add_group();
  void report_all(bool gradients, Kind gradient);

  const Case& drawn_;
  int rank_;
  ProcessGroup group_;
  std::string folder_;
  std::shared_ptr<Model> model_;
  std::unique_ptr<DistributedDataParallelBase> ddp_;  ///< Wrapped or FullySharded.
  std::unique_ptr<DataParallel<Model>> data_parallel_;
  Optimizer optimizer_;
  std::unique_ptr<optim::LearningRateScheduler> scheduler_;
  std::optional<optim::GradScaler> scaler_;
  std::map<int, at::Tensor> graphs_;  ///< Losses. [slot]
  std::string hook_;
  std::string hook_throws_;  ///< The place where the hook throws in the next backward: see set_hook().
  std::vector<at::Tensor> added_;
  std::uint32_t event_ = 0;
  int batch_ = 0;
  std::int64_t steps_ = 0;
  double norm_ = 0;
  bool unscaled_ = false;
  bool has_gradients_ = false;  ///< Averaged gradients for a step exist.
};

}  // namespace ddpkit::fuzz
