#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include <ddpkit/data/length_bucketed_sampler.h>
#include <ddpkit/error.h>

#include "data/length_bucketed_sampler.h"
#include "support/catch.h"

using ddpkit::LengthBucketedSampler;
using ddpkit::LengthBucketedSamplerOptions;
using Lengths = std::vector<std::int64_t>;

namespace {

// Like utterances: most are short, few are long.
Lengths some_lengths(std::size_t count) {
  std::mt19937 random(5);
  Lengths lengths;
  for (std::size_t i = 0; i < count; ++i) {
    const auto draw = static_cast<std::int64_t>(random() % 1000);
    lengths.push_back(20 + draw * draw / 700);
  }
  return lengths;
}

}  // namespace

TEST_CASE("an epoch of length buckets holds every sample once, on any number of ranks", "[sampler]") {
  for (const std::size_t count : {std::size_t{1}, std::size_t{7}, std::size_t{64}, std::size_t{501}}) {
    for (const int ranks : {1, 2, 3, 4, 5}) {
      CAPTURE(count, ranks);
      const Lengths lengths = some_lengths(count);
      std::multiset<std::size_t> seen;
      std::size_t steps = 0, in_batches = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        LengthBucketedSampler sampler(lengths, ranks, rank, {.batch_size = 8, .seed = 3});
        sampler.set_epoch(2);
        if (rank == 0) steps = sampler.num_batches();
        CHECK(sampler.num_batches() == steps);  // All ranks have the same number of batches.
        CHECK(sampler.num_batches() == (count + 7) / 8);
        for (const auto& batch : sampler.batches()) {
          REQUIRE_FALSE(batch.indices.empty());
          // A batch has padding only if it has fewer samples than ranks.
          CHECK((batch.repeated == 0 || batch.batch_size < static_cast<std::size_t>(ranks)));
          const std::size_t own = batch.indices.size() - batch.repeated;
          const std::size_t share = batch.batch_size / static_cast<std::size_t>(ranks);
          CHECK((own == share || own == share + 1));
          seen.insert(batch.indices.begin(), batch.indices.begin() + static_cast<std::ptrdiff_t>(own));
          if (rank == 0) in_batches += batch.batch_size;
        }
      }
      CHECK(in_batches == count);
      CHECK(seen.size() == count);
      CHECK(std::set<std::size_t>(seen.begin(), seen.end()).size() == count);
    }
  }
}

TEST_CASE("a batch has the same samples on any number of ranks", "[sampler]") {
  const Lengths lengths = some_lengths(203);
  std::vector<std::set<std::size_t>> alone;
  for (const int ranks : {1, 2, 3, 5}) {
    std::vector<std::set<std::size_t>> together;
    for (int rank = 0; rank < ranks; ++rank) {
      const LengthBucketedSampler sampler(lengths, ranks, rank, {.batch_size = 10});
      together.resize(sampler.num_batches());
      for (std::size_t i = 0; i < sampler.num_batches(); ++i)
        together[i].insert(sampler.batches()[i].indices.begin(), sampler.batches()[i].indices.end());
    }
    if (ranks == 1) alone = together;
    CHECK(together == alone);
  }
}

TEST_CASE("length buckets depend on seed and epoch alone", "[sampler]") {
  const Lengths lengths = some_lengths(100);
  const auto order = [&](std::uint64_t seed, std::uint64_t epoch) {
    LengthBucketedSampler sampler(lengths, 2, 1, {.batch_size = 4, .seed = seed});
    sampler.set_epoch(epoch);
    std::vector<std::size_t> all;
    while (const auto batch = sampler.next()) all.insert(all.end(), batch->indices.begin(), batch->indices.end());
    return all;
  };
  CHECK(order(0, 0) == order(0, 0));
  CHECK(order(0, 0) != order(0, 1));
  CHECK(order(0, 0) != order(9, 0));
}

TEST_CASE("length buckets are even over ranks and hold similar lengths", "[sampler]") {
  const Lengths lengths = some_lengths(2000);
  for (const int ranks : {2, 4}) {
    const LengthBucketedSampler bucketed(lengths, ranks, 0, {.batch_size = 32});
    const LengthBucketedSampler random(lengths, ranks, 0, {.batch_size = 32, .batches_per_bucket = 1});
    CHECK(bucketed.balance().fullest_over_mean >= 1);
    CHECK(bucketed.balance().fullest_over_mean < 1.02);
    CHECK(bucketed.balance().padding < 0.05);
    CHECK(random.balance().padding > 0.3);
  }
}

TEST_CASE("length buckets can be dropped, unshuffled and refused", "[sampler]") {
  const LengthBucketedSampler dropped(some_lengths(21), 1, 0, {.batch_size = 8, .drop_last = true});
  CHECK(dropped.num_batches() == 2);
  for (const auto& batch : dropped.batches()) CHECK(batch.indices.size() == 8);

  const LengthBucketedSampler sorted({5, 1, 9, 3, 7}, 1, 0, {.batch_size = 2, .shuffle = false});
  CHECK(sorted.batches()[0].indices == std::vector<std::size_t>{1});
  CHECK(sorted.batches()[1].indices == std::vector<std::size_t>{0, 3});
  CHECK(sorted.batches()[2].indices == std::vector<std::size_t>{2, 4});

  CHECK_THROWS_WITH(LengthBucketedSampler({1, 2}, 3, 0, {.batch_size = 2}), ContainsSubstring("a batch of 2 samples"));
  CHECK_THROWS_WITH(LengthBucketedSampler({}, 1, 0), ContainsSubstring("0 samples"));
  CHECK_THROWS_WITH(LengthBucketedSampler({1, 2}, 1, 0, {.drop_last = true}), ContainsSubstring("2 samples"));
  CHECK_THROWS_WITH(LengthBucketedSampler({1, -2}, 1, 0), ContainsSubstring("sample 1 has length -2"));
  CHECK_THROWS_WITH(LengthBucketedSampler({1}, 2, 2), ContainsSubstring("no rank 2"));
}

TEST_CASE("a saved position of length buckets resumes with the next batch, on other ranks too", "[sampler]") {
  const Lengths lengths = some_lengths(90);
  LengthBucketedSampler first(lengths, 1, 0, {.batch_size = 6});
  first.set_epoch(4);
  for (int i = 0; i < 5; ++i) first.next();
  torch::serialize::OutputArchive saved;
  first.save(saved);
  std::stringstream stream;
  saved.save_to(stream);
  const auto expected = first.next();

  std::set<std::size_t> indices;
  for (int rank = 0; rank < 3; ++rank) {
    stream.seekg(0);
    torch::serialize::InputArchive archive;
    archive.load_from(stream);
    LengthBucketedSampler loaded(lengths, 3, rank, {.batch_size = 6});
    loaded.load(archive);
    CHECK(loaded.epoch() == 4);
    CHECK(loaded.position() == 5);
    loaded.set_epoch(4);  // As in a loop over epochs.
    CHECK(loaded.position() == 5);
    const auto batch = loaded.next();
    indices.insert(batch->indices.begin(), batch->indices.end());
  }
  CHECK(indices == std::set<std::size_t>(expected->indices.begin(), expected->indices.end()));

  stream.seekg(0);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  LengthBucketedSampler shorter(some_lengths(12), 1, 0, {.batch_size = 6});
  CHECK_THROWS_WITH(shorter.load(archive), ContainsSubstring("is at batch 5"));
  CHECK(shorter.position() == 0);
}

TEST_CASE("the rest of an epoch of length buckets is dealt to other ranks", "[sampler]") {
  const Lengths lengths = some_lengths(90);
  std::vector<LengthBucketedSampler> samplers;
  for (int rank = 0; rank < 3; ++rank)
    samplers.emplace_back(lengths, 3, rank, LengthBucketedSamplerOptions{.batch_size = 6});
  std::set<std::size_t> used;
  const auto take = [&](LengthBucketedSampler& sampler) {
    const auto batch = sampler.next();
    if (!batch) return false;
    LengthBucketedSampler::Impl::of(sampler).add_trained(1);
    for (const std::size_t index : batch->indices) CHECK(used.insert(index).second);
    return true;
  };
  for (auto& sampler : samplers) sampler.set_epoch(4);
  for (int i = 0; i < 5; ++i) {
    for (auto& sampler : samplers) REQUIRE(take(sampler));
  }
  samplers[0].next();  // Dealt, but not trained on.
  samplers.pop_back();
  for (int rank = 0; rank < 2; ++rank) {
    auto& sampler = samplers[static_cast<std::size_t>(rank)];
    LengthBucketedSampler::Impl::of(sampler).regroup(2, rank);
    CHECK(sampler.epoch() == 4);
    CHECK(sampler.position() == 5);
    sampler.set_epoch(4);  // As in a loop over epochs.
    while (take(sampler)) continue;
  }
  CHECK(used.size() == lengths.size());
  CHECK_THROWS_WITH(LengthBucketedSampler::Impl::of(samplers[0]).regroup(7, 0),
                    ContainsSubstring("a batch of 6 samples cannot be divided among 7 ranks"));
}

TEST_CASE("length buckets whose position is unknown cannot be saved", "[sampler]") {
  const auto save = [](const LengthBucketedSampler& sampler) {
    torch::serialize::OutputArchive archive;
    sampler.save(archive);
  };
  LengthBucketedSampler sampler(some_lengths(90), 1, 0, {.batch_size = 6});
  CHECK(sampler.batches().size() == 15);
  CHECK_THROWS_WITH(save(sampler), ContainsSubstring("was taken from it at once"));
  sampler.set_position(2);
  CHECK_NOTHROW(save(sampler));
  sampler.set_epoch(1);
  CHECK_NOTHROW(save(sampler));
  std::thread([&] { sampler.next(); }).join();
  CHECK_THROWS_WITH(save(sampler), ContainsSubstring("another thread"));
}
