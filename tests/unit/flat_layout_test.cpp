#include "tensor/flat_layout.h"

#include <random>

#include "support/catch.h"
#include "support/seed.h"

using ddpkit::aligned_numel;
using ddpkit::FlatLayout;
using ddpkit::kAlignment;
using ddpkit::make_flat_layout;

TEST_CASE("a flat layout of three tensors on two ranks") {
  const FlatLayout layout = make_flat_layout({20, 0, 3}, 4, 2);
  CHECK(layout.offsets == std::vector<std::int64_t>{0, 32, 32});
  CHECK(layout.shard_numel == 32);  // 48 elements with padding: 1.5 cache lines per rank.
  CHECK(layout.numel == 64);
  CHECK(layout.range(0, 0).count == 20);
  CHECK(layout.range(0, 1).count == 0);
  CHECK(layout.range(2, 1).in_tensor == 0);
  CHECK(layout.range(2, 1).in_shard == 0);
  CHECK(layout.range(2, 1).count == 3);
  CHECK(make_flat_layout({}, 4, 3).numel == 0);
}

TEST_CASE("the shards of a flat layout hold each element of each tensor once") {
  std::mt19937_64 random(ddpkit::testing::seed_of_this_run());
  for (int number = 0; number < 2000; ++number) {
    const std::size_t element = std::size_t{1} << random() % 5;
    const auto line = static_cast<std::int64_t>(kAlignment / element);
    const int ranks = 1 + static_cast<int>(random() % 20);
    std::vector<std::int64_t> numels(random() % 12);
    for (std::int64_t& numel : numels) numel = static_cast<std::int64_t>(random() % (1U << random() % 12));
    const FlatLayout layout = make_flat_layout(numels, element, ranks);
    INFO(numels.size() << " tensors of elements of " << element << " bytes on " << ranks << " ranks");
    REQUIRE(layout.numels == numels);
    REQUIRE(layout.numel == ranks * layout.shard_numel);
    REQUIRE(layout.shard_numel % line == 0);
    std::int64_t end = 0;
    for (std::size_t i = 0; i < numels.size(); ++i) {
      REQUIRE(layout.offsets[i] == end);
      REQUIRE(layout.offsets[i] % line == 0);
      end += aligned_numel(numels[i], element);
      std::int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const FlatLayout::Range range = layout.range(i, rank);
        REQUIRE(range.in_shard + range.count <= layout.shard_numel);
        if (range.count == 0) continue;
        REQUIRE(range.in_tensor == next);
        REQUIRE(rank * layout.shard_numel + range.in_shard == layout.offsets[i] + range.in_tensor);
        next += range.count;
      }
      REQUIRE(next == numels[i]);
    }
    REQUIRE(end <= layout.numel);
    REQUIRE(layout.numel < end + ranks * line);
  }
}
