// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ddpkit/comm/process_group.h>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace ddpkit::train {

/// Indices begin .. end-1.
struct IndexRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t size() const noexcept { return end - begin; }
};

/// Rank `rank`'s share of 0 .. size-1 for evaluation: every index belongs to exactly one rank, so that nothing is
/// counted twice. Shares differ by at most one; with fewer indices than ranks some are empty.
IndexRange evaluation_share(std::int64_t size, int rank, int world_size);

/// Sums each value over the ranks, in one all-reduce of doubles: exact for counts up to 2^53, the same bits on every
/// rank. Collective: all ranks pass equally many values.
std::vector<double> sum_over_ranks(const std::vector<double>& values, const ProcessGroup& group);

/// The most main memory that each rank's process has held so far, in bytes. Collective. [rank]
std::vector<std::int64_t> peak_memory_of_ranks(const ProcessGroup& group);

/// The most memory of each of `devices` that LibTorch has given out so far to this process, in bytes, then that of the
/// other ranks' devices. None for the CPU, whose memory peak_memory_of_ranks() tells. Collective. [device]
std::vector<std::int64_t> peak_memory_of_devices(const std::vector<c10::Device>& devices, const ProcessGroup& group);

/// How a classifier did, over all samples of all ranks.
struct ClassificationResult {
  double loss = 0;      ///< Mean; NaN without samples.
  double accuracy = 0;  ///< Share of samples whose highest logit is the target's: 0 .. 1; NaN without samples.
  std::int64_t samples = 0;
  /// Samples by the class they are of and the class they were taken for. [target][predicted]
  std::vector<std::vector<std::int64_t>> confusion = {};

  /// Of each class, the harmonic mean of precision and recall: 0 .. 1, and 0 for a class of which no sample was found
  /// (as scikit-learn's zero_division=0). [class]
  std::vector<double> f1() const;
  /// The mean of f1() over all classes that have samples or were predicted; NaN when there is none.
  double macro_f1() const;
};

/// Where each class went, and its F1: a table for a terminal. `class_names`: [class].
std::string confusion_table(const ClassificationResult& result, const std::vector<std::string>& class_names);

/// Sums up a classifier's batches on their device, without waiting for it, until reduce(). Several threads may add: the
/// counts do not depend on their order, the loss's last bits do.
class ClassificationMetrics {
 public:
  /// Batches of `classes` logits each, on one device or several.
  explicit ClassificationMetrics(std::int64_t classes);
  ~ClassificationMetrics();
  ClassificationMetrics(ClassificationMetrics&&) noexcept;
  ClassificationMetrics& operator=(ClassificationMetrics&&) noexcept;

  /// `logits` [batch, classes], `targets` [batch] int64, `mean_loss` a scalar: the batch's mean loss.
  void add(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& mean_loss);

  /// The two parts of add(), for who has the loss of several batches in one: what was predicted,
  void add_predictions(const at::Tensor& logits, const at::Tensor& targets);
  /// and the mean loss over `samples` samples.
  void add_loss(const at::Tensor& mean_loss, std::int64_t samples);

  /// Everything added so far on all ranks; the same bits on each. Collective, one all-reduce.
  ClassificationResult reduce(const ProcessGroup& group) const;

  /// This rank's sums, so that a run goes on within an epoch: a CheckpointPart of each rank.
  void save(torch::serialize::OutputArchive& archive) const;
  /// In place of what was added so far. Throws InvalidArgument for another number of classes.
  void load(torch::serialize::InputArchive& archive);

 private:
  struct Sums;
  Sums& sums_on(c10::Device device);
  at::Tensor all_sums() const;  // On the host, as doubles: the confusion, then the loss. [classes * classes + 2]

  std::int64_t classes_;
  std::unique_ptr<std::mutex> mutex_;
  std::vector<std::pair<c10::Device, std::unique_ptr<Sums>>> sums_;
};

}  // namespace ddpkit::train
