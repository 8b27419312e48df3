// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ddpkit/comm/process_group.h>

namespace ddpkit {

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

struct ReducerOptions {
  std::size_t first_bucket_bytes = std::size_t{1} << 20;
  std::size_t bucket_bytes = std::size_t{25} << 20;
};

/// When one bucket's reduction ran in the last synchronised backward, on this rank's steady clock.
struct BucketTiming {
  std::size_t bytes = 0;
  std::size_t parameters = 0;
  std::chrono::steady_clock::time_point ready;     ///< Its last gradient was there.
  std::chrono::steady_clock::time_point started;   ///< Its all-reduce was handed to the backend.
  std::chrono::steady_clock::time_point finished;  ///< Its result was waited for.
};

/// What happened in the last synchronised backward.
struct BackwardTrace {
  std::vector<BucketTiming> buckets;  ///< [bucket], in the order they are reduced.
  std::chrono::steady_clock::time_point first_gradient;
  std::chrono::steady_clock::time_point last_gradient;
};

/// Averages gradients over ranks while backward runs. Hooks on the parameters' gradient accumulators put each gradient
/// into its bucket as autograd makes it; a full bucket's all-reduce starts at once; the end of backward waits for the
/// last. After backward each parameter's gradient aliases its bucket's memory.
///
/// Backward must give every parameter a gradient, in each rank; it throws on this rank, and tells the others, when it
/// does not. One backward at a time. The parameters must outlive the reducer's last backward.
class Reducer {
 public:
  /// Collective: allocates the buckets. `parameters` are those that want a gradient, each once, the same on all ranks.
  Reducer(std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options = {});
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// False: backward leaves gradients local, to accumulate until the next synchronised backward.
  void set_synchronize(bool synchronize) noexcept;
  bool synchronize() const noexcept;

  /// Parameter indices by bucket, in the order buckets are reduced. [bucket][position]
  const std::vector<std::vector<std::size_t>>& buckets() const noexcept;
  /// Empty before the first synchronised backward.
  const std::optional<BackwardTrace>& last_backward() const noexcept;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace ddpkit
