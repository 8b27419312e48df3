#include <ddpkit/data/distributed_weighted_sampler.h>

#include <torch/serialize/archive.h>

#include <cmath>
#include <sstream>

#include <ddpkit/error.h>

#include "support/catch.h"

using ddpkit::DistributedWeightedSampler;

namespace {

std::vector<double> some_weights() { return {0, 1, 2, 0, 4, 8, 1, 0.5, 3, 0}; }

}  // namespace

TEST_CASE("ranks take disjoint places of one sequence, all equally many", "[weighted_sampler]") {
  const DistributedWeightedSampler alone(some_weights(), 1, 0, {.seed = 7, .num_samples = 60});
  const std::vector<std::size_t> all = alone.indices();
  REQUIRE(all.size() == 60);
  for (int world_size = 1; world_size <= 5; ++world_size) {
    std::vector<std::size_t> joined(60);
    for (int rank = 0; rank < world_size; ++rank) {
      const DistributedWeightedSampler sampler(some_weights(), world_size, rank, {.seed = 7, .num_samples = 60});
      const std::vector<std::size_t> mine = sampler.indices();
      REQUIRE(mine.size() == 60 / static_cast<std::size_t>(world_size));
      for (std::size_t i = 0; i < mine.size(); ++i)
        joined[i * static_cast<std::size_t>(world_size) + static_cast<std::size_t>(rank)] = mine[i];
    }
    CHECK(joined == all);
  }
  // Rounded up if it is not a multiple of the ranks.
  for (int rank = 0; rank < 4; ++rank) CHECK(DistributedWeightedSampler(some_weights(), 4, rank).num_samples() == 3);
}

TEST_CASE("indices are drawn in proportion to their weights, and never at weight 0", "[weighted_sampler]") {
  const std::vector<double> weights = some_weights();
  constexpr std::size_t kDraws = 200'000;
  DistributedWeightedSampler sampler(weights, 2, 1, {.seed = 3, .num_samples = 2 * kDraws});
  std::vector<double> counts(weights.size());
  for (const std::size_t index : sampler.indices()) ++counts.at(index);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const double share = weights[i] / 19.5;
    // Six standard deviations of a binomial.
    const double slack = 6 * std::sqrt(share * (1 - share) / kDraws);
    CHECK(std::abs(counts[i] / kDraws - share) <= slack);
    if (weights[i] == 0) CHECK(counts[i] == 0);
  }
}

TEST_CASE("the draw depends on seed and epoch alone", "[weighted_sampler]") {
  DistributedWeightedSampler sampler(some_weights(), 2, 0, {.seed = 1, .num_samples = 100});
  DistributedWeightedSampler copy = sampler;  // The copy of a data loader.
  const auto first = sampler.indices();
  sampler.set_epoch(1);
  CHECK(copy.indices() != first);
  CHECK(copy.epoch() == 1);
  sampler.set_epoch(0);
  CHECK(sampler.indices() == first);
  CHECK(DistributedWeightedSampler(some_weights(), 2, 0, {.seed = 2, .num_samples = 100}).indices() != first);
}

TEST_CASE("a loaded weighted sampler resumes with the next sample", "[weighted_sampler]") {
  DistributedWeightedSampler sampler(some_weights(), 2, 1, {.seed = 5, .num_samples = 40});
  sampler.set_epoch(3);
  sampler.reset();
  REQUIRE(sampler.next(6).has_value());
  torch::serialize::OutputArchive saved;
  sampler.save(saved);
  std::stringstream stream;
  saved.save_to(stream);
  const auto expected = sampler.next(100);

  DistributedWeightedSampler other(some_weights(), 2, 1, {.seed = 5, .num_samples = 40});
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  other.load(archive);
  CHECK(other.epoch() == 3);
  CHECK(other.next(100) == expected);
  CHECK_FALSE(other.next(1).has_value());
}

TEST_CASE("weights that cannot be drawn from are refused", "[weighted_sampler]") {
  const auto refused = [](std::vector<double> weights, const std::string& message) {
    CHECK_THROWS_WITH(DistributedWeightedSampler(std::move(weights), 1, 0), ContainsSubstring(message));
  };
  refused({}, "the 0 weights sum to 0");
  refused({0, 0}, "the 2 weights sum to 0");
  refused({1, -0.5}, "weight 1 is -0.5");
  refused({1, NAN}, "weight 1 is nan");
  CHECK_THROWS_AS(DistributedWeightedSampler({1}, 2, 2), ddpkit::InvalidArgument);
  CHECK_THROWS_AS(DistributedWeightedSampler({1}, 1, 0, {.num_samples = 0}), ddpkit::InvalidArgument);
  DistributedWeightedSampler sampler({1, 2}, 1, 0);
  CHECK_THROWS_AS(sampler.reset(3), ddpkit::InvalidArgument);
}
