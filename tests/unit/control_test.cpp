// Fields that ranks read while the owner continues to write.
#include "comm/shm/control.h"

#include <atomic>
#include <memory>
#include <thread>

#include "support/catch.h"

using ddpkit::shm::CollectiveHeader;
using ddpkit::shm::CollectiveKind;
using ddpkit::shm::kMaxOutstanding;
using ddpkit::shm::last_header;
using ddpkit::shm::RankBlock;

namespace {

CollectiveHeader header_number(std::uint64_t sequence) {
  return {.sequence = sequence,
          .numel = sequence * 3,
          .kind = CollectiveKind::kReduce,
          .dtype = static_cast<std::uint8_t>(sequence),
          .reduce_op = 1,
          .root = static_cast<std::int32_t>(sequence % 1000),
          .tensors = 2,
          .tensor_sizes = ~sequence,
          .address = {.segment = 5, .offset = sequence * 7}};
}

bool same(const CollectiveHeader& a, const CollectiveHeader& b) {
  return a.sequence == b.sequence && a.numel == b.numel && a.kind == b.kind && a.dtype == b.dtype &&
         a.reduce_op == b.reduce_op && a.root == b.root && a.tensors == b.tensors && a.tensor_sizes == b.tensor_sizes &&
         a.address.segment == b.address.segment && a.address.offset == b.address.offset;
}

}  // namespace

TEST_CASE("a rank's last call is read whole while the rank continues to call") {
  const auto block = std::make_unique<RankBlock>();
  CHECK_FALSE(last_header(*block));
  std::atomic<bool> over{false};
  std::thread owner([&] {
    for (std::uint64_t sequence = 0; sequence < 300000; ++sequence) {
      block->headers[sequence % kMaxOutstanding].store(header_number(sequence));
      block->progress.posted.store(sequence + 1, std::memory_order_release);
    }
    over = true;
  });
  int wrong = 0;
  std::uint64_t latest = 0;
  while (!over) {
    const auto header = last_header(*block);
    if (!header) continue;
    if (!same(*header, header_number(header->sequence)) || header->sequence < latest) ++wrong;
    latest = header->sequence;
  }
  owner.join();
  CHECK(wrong == 0);
  REQUIRE(last_header(*block));
  CHECK(same(*last_header(*block), header_number(299999)));
}
