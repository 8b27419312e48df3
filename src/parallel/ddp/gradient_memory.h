// Tier 1. Where gradients lie while they are reduced, and how they get there and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include <ddpkit/comm/arena_stats.h>
#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/reducer.h>

namespace ddpkit {

class ArenaLease;
class OwnBackend;
class StreamSet;

/// One of two ways, the same on all ranks:
///   in place  the backend reduces gradients where they stand, if that is the arena. Those that autograd made
///             elsewhere, in another order of elements, or shares with somebody, are copied into a place there.
///   flat      each bucket has one buffer, into which all of its gradients are copied.
///
/// Gradients are handed over with take() or take_unused() as backward makes them, and handed back with give() when
/// their bucket is reduced.
class GradientMemory {
 public:
  struct Options {
    bool as_bucket_view = false;
    bool flat = false;  ///< Whoever reduces wants one buffer a bucket.
    bool arena = true;
    std::optional<std::size_t> arena_bytes;
  };

  using Strides = std::vector<std::vector<std::int64_t>>;  ///< [param][dimension]

  /// Collective. `parameters` are dense ones. `strides`, the same on all ranks, order each gradient's elements in
  /// messages. A rank's own gradient may have others: it is copied.
  GradientMemory(const std::vector<NamedParameter>& parameters, Strides strides, ProcessGroup group,
                 const Options& options);
  ~GradientMemory();

  /// Collective: makes room for buckets of these parameters. [bucket][position] -> index
  void lay_out(const std::vector<std::vector<std::size_t>>& plan);
  bool flat() const noexcept { return flat_; }
  /// From now on each rank gets only its slice of each averaged gradient: take_slice() instead of give(). Call
  /// lay_out() next.
  void set_sharded(bool sharded);
  bool sharded() const noexcept { return sharded_; }

  /// The gradient of parameter `index`, which autograd has just made of `added`, or added it to.
  void take(std::size_t index, const at::Tensor& added);
  /// This rank's gradient of a parameter that took no part in backward: what it had before, or zero.
  void take_unused(std::size_t index);
  /// Before start(), or before somebody else reduces buffer(): gradients that were only noted are copied, on the
  /// current stream.
  void gather(std::size_t bucket);
  /// Averages a bucket, all of whose gradients have been taken, over the ranks.
  Work start(std::size_t bucket);
  /// Puts the reduced gradient into the parameter; on a device only scatter() does, for all that were given.
  void give(std::size_t index);
  void scatter();
  /// A backward has failed half-way.
  void forget() noexcept;
  /// The buffers' memory is not used again before the streams are done with it.
  void keep_alive_for(const StreamSet& streams) const;
  /// This rank's slice of the reduced gradient, one-dimensional; the parameter loses its gradient.
  at::Tensor take_slice(std::size_t index);
  /// Leaves the parameter's gradient as it was before take_unused().
  void keep(std::size_t index) {
    entries_[index].piece.reset();
    entries_[index].slice.reset();
  }

  /// The flat buffer, and a gradient's part of it.
  const at::Tensor& buffer(std::size_t bucket) const { return buffers_[bucket]; }
  const at::Tensor& home(std::size_t index) const { return entries_[index].home; }
  at::IntArrayRef strides(std::size_t index) const { return entries_[index].strides; }
  /// Empty without an arena.
  std::optional<ArenaStats> arena() const;

 private:
  struct Entry {
    at::Tensor parameter;
    std::vector<std::int64_t> strides;
    at::Tensor home;   ///< This gradient's place in memory of ours; undefined where one is made when it is needed.
    at::Tensor piece;  ///< What is being reduced: the parameter's own gradient, or a copy at home.
    at::Tensor slice;  ///< Sharded: what comes of it for this rank.
    std::int64_t offset = 0;  ///< Sharded and flat: where its slices begin in each rank's section, in elements.
  };

  /// A kernel a tensor is slow on a device: there copies wait for each other.
  struct Copies {
    std::vector<at::Tensor> to, from;
  };

  at::Tensor home_for(Entry& entry);
  bool reducible(const at::Tensor& gradient, const Entry& entry, const at::Tensor& added) const;
  static void copy_all(Copies& copies);
  void lay_out_flat();
  void lay_out_sections();
  void put_into_sections(std::size_t index, const at::Tensor& gradient);
  Work start_sharded(std::size_t bucket);
  void lay_out_homes();

  ProcessGroup group_;
  OwnBackend* own_ = nullptr;
  Options options_;
  bool flat_ = false;
  bool sharded_ = false;
  bool on_device_ = false;
  std::shared_ptr<ArenaLease> arena_;
  std::vector<Entry> entries_;                  ///< [param]
  std::vector<std::vector<std::size_t>> plan_;  ///< [bucket][position]
  std::vector<at::Tensor> buffers_;             ///< Flat: [bucket]; sharded: a section for each rank.
  std::vector<std::size_t> bucket_of_;          ///< [param]
  std::vector<Copies> arriving_;                ///< On a device: gradients not yet in their buffer. [bucket]
  Copies leaving_;                              ///< The same for those not yet in their parameter.
};

}  // namespace ddpkit
