#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ddpkit/data/length_bucketed_sampler.h>

#include "data/sampling.h"

namespace ddpkit {

class LengthBucketedSampler::Impl final : public sampling::Regroupable {
 public:
  Impl(std::vector<std::int64_t> lengths, int world_size, int rank, const LengthBucketedSamplerOptions& options);
  static Impl& of(const LengthBucketedSampler& sampler) noexcept { return *sampler.impl_; }

  void set_epoch(std::uint64_t next);
  void add_trained(std::size_t count) noexcept override { trained_ += count; }
  void regroup(int world_size, int rank) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  std::uint64_t epoch = 0;
  bool was_loaded = false;
  sampling::EpochPosition position = sampling::EpochPosition();
  std::vector<LengthBucketedBatch> batches = {};  ///< Of this rank. [batch]
  LengthBalance balance = {};

 private:
  void set_rank(int world_size, int rank);
  void draw();
  void start_at(std::size_t batch);

  const std::vector<std::int64_t> lengths_;
  const LengthBucketedSamplerOptions options_;
  std::size_t world_size_ = 0, rank_ = 0;
  std::size_t start_ = 0;    ///< First batch after set_epoch(), load() or regroup().
  std::size_t trained_ = 0;  ///< See add_trained(). Since then.
};

}  // namespace ddpkit
