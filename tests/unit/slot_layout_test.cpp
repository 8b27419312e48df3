// The partition of tensors into ranks' slices and slots.
#include <random>

#include "comm/shm/diagnostics.h"
#include "comm/shm/operation.h"
#include "support/catch.h"
#include "support/seed.h"

using namespace ddpkit::shm;

TEST_CASE("the ranks' slices of a tensor are its cache lines, each in one slice") {
  std::mt19937_64 random(ddpkit::testing::seed_of_this_run());
  for (int number = 0; number < 5000; ++number) {
    const std::size_t element = std::size_t{1} << random() % 4;
    const std::size_t numel = random() % (std::size_t{1} << (1 + random() % 20));
    const int ranks = 1 + static_cast<int>(random() % 1100);
    INFO(numel << " elements of " << element << " bytes on " << ranks << " ranks");
    std::size_t next = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const Span slice = slice_of(numel, element, rank, ranks);
      if (slice.count == 0) continue;
      REQUIRE(slice.begin == next);
      REQUIRE(slice.begin * element % kCacheLine == 0);
      next = slice.begin + slice.count;
    }
    REQUIRE(next == numel);
  }
}

TEST_CASE("the pieces of a slot lie in it, apart") {
  for (const CollectiveKind kind : {CollectiveKind::kAllReduce, CollectiveKind::kScatter,
                                    CollectiveKind::kReduceScatter, CollectiveKind::kAllToAll}) {
    for (int ranks = 1; ranks <= 910; ++ranks) {
      const SlotLayout layout = slot_layout(kind, ranks, kSlotBytes);
      INFO(ddpkit::shm::name_of(kind) << " on " << ranks << " ranks");
      REQUIRE(layout.piece_bytes > 0);
      REQUIRE(layout.piece_bytes % kCacheLine == 0);
      REQUIRE(layout.pieces == (kind == CollectiveKind::kAllReduce ? 1U : static_cast<std::size_t>(ranks)));
      REQUIRE(layout.begin + layout.pieces * layout.piece_bytes <= kSlotStride);
      if (kind == CollectiveKind::kAllToAll)
        REQUIRE(layout.begin >= sizeof(SlotHead) + static_cast<std::size_t>(ranks) * sizeof(std::uint64_t));
    }
  }
}

TEST_CASE("pieces that fit into the head of a slot lie in it") {
  for (const int ranks : {1, 2, 3, 12, 13}) {
    for (const std::size_t piece : {4, 8, 16, 48, 52}) {
      INFO(piece << " bytes for each of " << ranks << " ranks");
      const SlotLayout layout = slot_layout(CollectiveKind::kReduceScatter, ranks, piece);
      const std::size_t end = layout.begin + layout.pieces * layout.piece_bytes;
      CHECK(layout.begin >= 2 * sizeof(std::uint64_t));
      CHECK(layout.piece_bytes >= piece);
      CHECK((end <= sizeof(SlotHead)) == (piece * static_cast<std::size_t>(ranks) <= sizeof(SlotHead::data)));
      CHECK((end <= sizeof(SlotHead) || layout.begin >= sizeof(SlotHead)));
    }
  }
  CHECK(slot_layout(CollectiveKind::kAllToAll, 2, 4).begin >= sizeof(SlotHead) + 2 * sizeof(std::uint64_t));
}

TEST_CASE("a collective that has no room for each rank's piece is refused") {
  const auto check_most = [](CollectiveKind kind, int most) {
    INFO(ddpkit::shm::name_of(kind));
    CHECK_NOTHROW(check_pieces(kind, most));
    CHECK_THROWS_WITH(check_pieces(kind, most + 1),
                      ContainsSubstring(std::to_string(most)) && ContainsSubstring(std::to_string(most + 1)));
  };
  check_most(CollectiveKind::kAllToAll, 910);
  check_most(CollectiveKind::kScatter, 1024);
  check_most(CollectiveKind::kReduceScatter, 1024);
  CHECK_NOTHROW(check_pieces(CollectiveKind::kAllReduce, 5000));
}
