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
  std::int64_t begin = 0;  ///< First index.
  std::int64_t end = 0;    ///< Behind the last index.

  std::int64_t size() const noexcept { return end - begin; }  ///< Number of indices.
};

/// Returns the part of 0 .. size-1 that rank `rank` evaluates. Every index belongs to exactly one rank, so no sample
/// counts twice. Parts differ by at most one index; with fewer indices than ranks some are empty.
IndexRange evaluation_share(std::int64_t size, int rank, int world_size);

/// Sums each value over the ranks, in one all-reduce of doubles: exact for counts up to 2^53, the same bits on every
/// rank. Collective: all ranks pass the same number of values.
std::vector<double> sum_over_ranks(const std::vector<double>& values, const ProcessGroup& group);

/// Returns the peak resident memory of each rank's process, in bytes. Collective. [rank]
std::vector<std::int64_t> peak_memory_of_ranks(const ProcessGroup& group);

/// Returns LibTorch's peak allocated memory on each of `devices` in this process, then on the devices of the other
/// ranks, in bytes. Skips the CPU: see peak_memory_of_ranks(). Collective. [device]
std::vector<std::int64_t> peak_memory_of_devices(const std::vector<c10::Device>& devices, const ProcessGroup& group);

/// The mean of a loss over the samples of an epoch.
class MeanLoss {
 public:
  /// Adds a mean loss over `samples` samples of this rank.
  void add(double mean, double samples) { add_sum(mean * samples, samples); }
  void add_sum(double sum, double samples);  ///< Adds the sum of their losses.

  /// Returns the mean over the samples of all ranks so far, equal on each rank; NaN without samples. Collective.
  double reduce(const ProcessGroup& group) const;

  /// Returns this rank's mean so far, for a ProgressBar: "loss=0.4521".
  std::string note() const;

  /// Saves this rank's sums, to resume within an epoch. Makes the class a CheckpointPart with of_each_rank.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);  ///< Replaces the sums.

 private:
  double sum_ = 0, samples_ = 0;
};

/// Result of a classifier over all samples of all ranks.
struct ClassificationResult {
  double loss = 0;           ///< Mean; NaN without samples.
  double accuracy = 0;       ///< Share of samples whose highest logit is the target's: 0 .. 1; NaN without samples.
  std::int64_t samples = 0;  ///< Over all ranks.
  /// Number of samples by true class and predicted class. [target][predicted]
  std::vector<std::vector<std::int64_t>> confusion = {};

  /// Returns the harmonic mean of precision and recall of each class: 0 .. 1. It is 0 for a class without correct
  /// predictions (as with scikit-learn's zero_division=0). [class]
  std::vector<double> f1() const;
  /// Returns the mean of f1() over all classes that have samples or were predicted; NaN if there are none.
  double macro_f1() const;
  /// "Loss: 0.6121, Acc: 74.80%"
  std::string line() const;
};

/// Returns the confusion matrix and the F1 of each class, as a table for a terminal. `class_names`: [class].
std::string confusion_table(const ClassificationResult& result, const std::vector<std::string>& class_names);

/// Returns the confusion matrix as an SVG document. Rows are true classes; a darker cell is a larger share of its row.
/// `class_names`: [class].
std::string confusion_svg(const ClassificationResult& result, const std::vector<std::string>& class_names);

/// Accumulates a classifier's results on the devices of its batches. Does not wait for a device before reduce(). add()
/// is thread-safe: the counts do not depend on the order of the calls, but the last bits of the loss do.
class ClassificationMetrics {
 public:
  /// For batches with `classes` logits, on one or several devices.
  explicit ClassificationMetrics(std::int64_t classes);
  ~ClassificationMetrics();
  ClassificationMetrics(ClassificationMetrics&&) noexcept;
  ClassificationMetrics& operator=(ClassificationMetrics&&) noexcept;

  /// `logits` [batch, classes], `targets` [batch] int64, `mean_loss` a scalar: the batch's mean loss.
  void add(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& mean_loss);

  /// The first part of add(): counts predictions. For callers that have one loss for several batches.
  void add_predictions(const at::Tensor& logits, const at::Tensor& targets);
  /// The second part of add(): adds the mean loss over `samples` samples.
  void add_loss(const at::Tensor& mean_loss, std::int64_t samples);

  /// Returns the results of all ranks so far; the same bits on each rank. Collective, one all-reduce.
  ClassificationResult reduce(const ProcessGroup& group) const;

  /// Returns this rank's results so far, for a ProgressBar: "loss=0.4521, acc=78.23%". Waits for the devices.
  std::string note() const;

  /// Saves this rank's sums, to resume within an epoch. Makes the class a CheckpointPart with of_each_rank.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Replaces the sums. Throws InvalidArgument for another number of classes.
  void load(torch::serialize::InputArchive& archive);

 private:
  struct Sums;
  Sums& sums_on(c10::Device device);
  at::Tensor all_sums() const;  // On the host, as doubles: confusion, then loss. [classes * classes + 2]

  std::int64_t classes_;
  std::unique_ptr<std::mutex> mutex_;
  std::vector<std::pair<c10::Device, std::unique_ptr<Sums>>> sums_;
};

}  // namespace ddpkit::train
