#include <torch/torch.h>

#include <algorithm>
#include <set>
#include <sstream>
#include <stdexcept>
#include <thread>

#include <ddpkit/data/distributed_sampler.h>
#include <ddpkit/data/distributed_weighted_sampler.h>
#include <ddpkit/data/prefetcher.h>
#include <ddpkit/error.h>

#include "support/captured_stderr.h"
#include "support/catch.h"

using ddpkit::DistributedSampler;
using ddpkit::DistributedSamplerOptions;
using Indices = std::vector<std::size_t>;

TEST_CASE("unshuffled indices are dealt in turn and padded from the front", "[sampler]") {
  const DistributedSamplerOptions options{.shuffle = false};
  CHECK(DistributedSampler(7, 3, 0, options).indices() == Indices{0, 3, 6});
  CHECK(DistributedSampler(7, 3, 1, options).indices() == Indices{1, 4, 0});
  CHECK(DistributedSampler(7, 3, 2, options).indices() == Indices{2, 5, 1});
}

TEST_CASE("drop_last leaves the tail out", "[sampler]") {
  const DistributedSamplerOptions options{.shuffle = false, .drop_last = true};
  CHECK(DistributedSampler(7, 3, 1, options).indices() == Indices{1, 4});
}

TEST_CASE("padding repeats a set smaller than the world several times", "[sampler]") {
  CHECK(DistributedSampler(2, 5, 4, {.shuffle = false}).indices() == Indices{0});
}

TEST_CASE("shuffled indices cover the set once, differently each epoch", "[sampler]") {
  std::multiset<std::size_t> seen;
  Indices first;
  for (int rank = 0; rank < 4; ++rank) {
    DistributedSampler sampler(100, 4, rank, {.seed = 3});
    for (const auto index : sampler.indices()) seen.insert(index);
    if (rank == 0) {
      first = sampler.indices();
      sampler.set_epoch(1);
      CHECK(sampler.indices() != first);
    }
  }
  CHECK(seen.size() == 100);
  CHECK(std::set<std::size_t>(seen.begin(), seen.end()).size() == 100);
}

TEST_CASE("set_epoch reaches the copy inside a data loader", "[sampler]") {
  struct Numbers : torch::data::Dataset<Numbers> {
    torch::data::Example<> get(size_t index) override { return {torch::tensor(static_cast<int64_t>(index)), {}}; }
    std::optional<size_t> size() const override { return 20; }
  };
  DistributedSampler sampler(20, 2, 1);
  auto loader = torch::data::make_data_loader(Numbers(), sampler, 4);
  const auto read = [&] {
    Indices seen;
    for (auto& batch : *loader) {
      for (auto& example : batch) seen.push_back(static_cast<std::size_t>(example.data.item<int64_t>()));
    }
    return seen;
  };
  sampler.set_epoch(0);
  const Indices first = read();
  CHECK(first == DistributedSampler(20, 2, 1).indices());
  sampler.set_epoch(1);
  const Indices second = read();
  CHECK(second == sampler.indices());
  CHECK(first != second);
}

TEST_CASE("a loaded sampler resumes with the next sample", "[sampler]") {
  DistributedSampler sampler(50, 2, 0, {.seed = 9});
  sampler.set_epoch(4);
  sampler.reset();
  sampler.next(7);
  torch::serialize::OutputArchive out;
  sampler.save(out);
  std::stringstream stream;
  out.save_to(stream);

  DistributedSampler other(50, 2, 0, {.seed = 9});
  torch::serialize::InputArchive in;
  in.load_from(stream);
  other.load(in);
  CHECK(other.epoch() == 4);
  for (;;) {
    const auto expected = sampler.next(5);
    CHECK(other.next(5) == expected);
    if (!expected) break;
  }
}

namespace {

template <class Sampler>
std::string saved(const Sampler& sampler) {
  torch::serialize::OutputArchive archive;
  sampler.save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  return stream.str();
}

template <class Sampler>
void load(Sampler& sampler, const std::string& bytes) {
  torch::serialize::InputArchive archive;
  archive.load_from(bytes.data(), bytes.size());
  sampler.load(archive);
}

}  // namespace

TEST_CASE("Any number of ranks resumes after another number stopped, each sample once", "[sampler]") {
  constexpr std::size_t kSize = 60;
  for (const int before : {1, 2, 3, 4}) {
    for (const int after : {1, 2, 3, 5}) {
      CAPTURE(before, after);
      std::multiset<std::size_t> seen;
      std::string state;
      for (int rank = 0; rank < before; ++rank) {
        DistributedSampler sampler(kSize, before, rank, {.seed = 5});
        sampler.set_epoch(2);
        sampler.reset();
        for (int batch = 0; batch < 2; ++batch) {
          const auto indices = sampler.next(3);
          seen.insert(indices->begin(), indices->end());
        }
        if (rank == 0)
          state = saved(sampler);
        else
          CHECK(state == saved(sampler));
      }
      std::size_t left = 0;
      for (int rank = 0; rank < after; ++rank) {
        DistributedSampler sampler(kSize, after, rank, {.seed = 5});
        load(sampler, state);
        const Indices rest = sampler.indices();
        sampler.set_epoch(2);  // As in a loop over epochs.
        sampler.reset();       // As in a data loader.
        Indices taken;
        while (const auto batch = sampler.next(4)) taken.insert(taken.end(), batch->begin(), batch->end());
        CHECK(taken == rest);
        seen.insert(taken.begin(), taken.end());
        left += taken.size();
        // The next epoch has all samples.
        sampler.set_epoch(3);
        sampler.reset();
        DistributedSampler fresh(kSize, after, rank, {.seed = 5});
        fresh.set_epoch(3);
        CHECK(sampler.indices() == fresh.indices());
      }
      const std::size_t padding = left - (kSize - static_cast<std::size_t>(before) * 6);
      CHECK(padding < static_cast<std::size_t>(after));
      CHECK(seen.size() == kSize + padding);
      CHECK(std::set<std::size_t>(seen.begin(), seen.end()).size() == kSize);
    }
  }
}

TEST_CASE("A caller that takes indices ahead reports the number of used indices", "[sampler]") {
  DistributedSampler sampler(20, 2, 1, {.seed = 1});
  const Indices all = sampler.indices();
  sampler.set_position(4);
  DistributedSampler other(20, 2, 1, {.seed = 1});
  load(other, saved(sampler));
  CHECK(other.indices() == Indices(all.begin() + 4, all.end()));
  other.set_position(3);
  DistributedSampler third(20, 2, 1, {.seed = 1});
  load(third, saved(other));
  CHECK(third.indices() == Indices(all.begin() + 7, all.end()));
  CHECK_THROWS_AS(third.set_position(4), ddpkit::InvalidArgument);
  third.set_position(0);
  DistributedSampler dropping(10, 4, 1, {.drop_last = true});
  CHECK_THROWS_WITH(dropping.set_position(3), "there is no sample 3 where 2 are left");
  dropping.set_position(2);
  DistributedSampler shorter(5, 1, 0);
  CHECK_THROWS_WITH(load(shorter, saved(third)), "the saved sampler is at sample 14, but an epoch has only 5 here");
  // The same result if the sampler shrinks after the load.
  const Indices left = third.indices();
  CHECK_THROWS_WITH(third.reset(10), "the saved sampler is at sample 14, but an epoch has only 10 here");
  CHECK_THROWS_AS(third.reset(0), ddpkit::InvalidArgument);
  CHECK(third.indices() == left);
  third.reset();
  third.reset(10);
  CHECK(third.indices().size() == 5);
}

namespace {

struct Numbers : torch::data::Dataset<Numbers> {
  explicit Numbers(std::size_t broken_index = 64) : broken(broken_index) {}
  torch::data::Example<> get(size_t index) override {
    if (index == broken) throw std::runtime_error("broken");
    return {torch::tensor(static_cast<int64_t>(index)), {}};
  }
  std::optional<size_t> size() const override { return 64; }
  std::size_t broken;
};

Indices indices_in(const std::vector<torch::data::Example<>>& batch) {
  Indices indices;
  for (const auto& example : batch) indices.push_back(static_cast<std::size_t>(example.data.item<int64_t>()));
  return indices;
}

template <class Sampler>
Sampler made_for(int rank) {
  if constexpr (std::is_same_v<Sampler, DistributedSampler>)
    return Sampler(64, 2, rank, {.seed = 5});
  else
    return Sampler(std::vector<double>(64, 1.0), 2, rank, {.seed = 5});
}

}  // namespace

TEMPLATE_TEST_CASE("A data loader's workers fetch ahead, and a checkpoint stores what the loop has received",
                   "[sampler]", DistributedSampler, ddpkit::DistributedWeightedSampler) {
  for (const std::size_t workers : {0, 1, 2, 4}) {
    for (const std::size_t batches : {1, 3, 7, 8}) {
      CAPTURE(workers, batches);
      const auto options = torch::data::DataLoaderOptions(4).workers(workers);
      auto sampler = made_for<TestType>(1);
      sampler.set_epoch(3);
      const Indices all = sampler.indices();
      Indices seen;
      std::string state;
      {
        auto loader = torch::data::make_data_loader(Numbers(), sampler, options);
        std::size_t taken = 0;
        for (auto& batch : *loader) {
          if (taken++ == batches) break;
          const Indices indices = indices_in(batch);
          seen.insert(seen.end(), indices.begin(), indices.end());
          state = saved(sampler);
        }
      }
      auto resumed = made_for<TestType>(1);
      load(resumed, state);
      resumed.set_epoch(3);
      auto loader = torch::data::make_data_loader(Numbers(), resumed, options);
      for (auto& batch : *loader) {
        const Indices indices = indices_in(batch);
        seen.insert(seen.end(), indices.begin(), indices.end());
      }
      CHECK(seen == all);
    }
  }
}

TEST_CASE("A batch that a worker could not make counts as taken, since it does not come again", "[sampler]") {
  for (const std::size_t workers : {0, 1, 3}) {
    CAPTURE(workers);
    DistributedSampler sampler(64, 1, 0, {.shuffle = false});
    auto loader =
        torch::data::make_data_loader(Numbers(5), sampler, torch::data::DataLoaderOptions(4).workers(workers));
    auto batch = loader->begin();
    CHECK(indices_in(*batch) == Indices{0, 1, 2, 3});
    CHECK_THROWS((++batch, *batch));
    DistributedSampler resumed(64, 1, 0, {.shuffle = false});
    load(resumed, saved(sampler));
    CHECK(resumed.next(2) == Indices{8, 9});
  }
}

TEST_CASE("A sampler whose position is unknown cannot be saved", "[sampler]") {
  {
    INFO("Batches in any order.");
    DistributedSampler sampler(64, 2, 0);
    auto loader = torch::data::make_data_loader(Numbers(), sampler,
                                                torch::data::DataLoaderOptions(4).workers(2).enforce_ordering(false));
    for (auto& batch : *loader) {
      (void)batch;
      CHECK_THROWS_WITH(saved(sampler), ContainsSubstring("enforce_ordering is false"));
    }
    DistributedSampler resumed(64, 2, 0);
    load(resumed, saved(sampler));
    CHECK(resumed.indices().empty());
  }
  {
    INFO("All indices at once.");
    DistributedSampler sampler(64, 2, 0);
    const Indices all = sampler.indices();
    CHECK_THROWS_WITH(saved(sampler), ContainsSubstring("was taken from it at once"));
    sampler.set_position(0);
    CHECK_NOTHROW(saved(sampler));
    sampler.set_epoch(1);
    CHECK_NOTHROW(saved(sampler));
  }
  {
    INFO("A thread that prefetches.");
    DistributedSampler sampler(64, 2, 0);
    std::thread([&] { sampler.next(8); }).join();
    CHECK_THROWS_WITH(saved(sampler), ContainsSubstring("another thread"));
    sampler.set_position(4);
    DistributedSampler resumed(64, 2, 0);
    load(resumed, saved(sampler));
    CHECK(resumed.indices().size() == 28);
  }
}

TEST_CASE("A new epoch begins at its first sample, without reset() too", "[sampler]") {
  DistributedSampler sampler(20, 2, 0, {.seed = 1});
  while (sampler.next(4)) {
  }
  sampler.set_epoch(1);
  CHECK(saved(sampler) == [] {
    DistributedSampler fresh(20, 2, 0, {.seed = 1});
    fresh.set_epoch(1);
    return saved(fresh);
  }());
  Indices taken;
  while (const auto batch = sampler.next(4)) taken.insert(taken.end(), batch->begin(), batch->end());
  CHECK(taken == sampler.indices());
}

TEST_CASE("A Prefetcher over a sampler keeps the sampler's position", "[sampler][prefetcher]") {
  for (const int workers : {0, 1, 3}) {
    for (const int batches : {0, 1, 4, 8}) {
      CAPTURE(workers, batches);
      DistributedSampler sampler(60, 2, 1, {.seed = 5});
      const Indices all = sampler.indices();
      const auto load_batch = [](const Indices& indices) { return indices; };
      Indices seen;
      {
        ddpkit::Prefetcher<Indices> loader(sampler, 4, load_batch, {.num_workers = workers});
        for (int i = 0; i < batches; ++i) {
          const Indices batch = *loader.next();
          seen.insert(seen.end(), batch.begin(), batch.end());
        }
      }
      DistributedSampler resumed(60, 2, 1, {.seed = 5});
      load(resumed, saved(sampler));
      ddpkit::Prefetcher<Indices> loader(resumed, 4, load_batch, {.num_workers = workers});
      while (const auto batch = loader.next()) seen.insert(seen.end(), batch->begin(), batch->end());
      CHECK(seen == all);
    }
  }
  CHECK_THROWS_AS(ddpkit::Prefetcher<int>(DistributedSampler(6, 2, 1), 0, [](const Indices&) { return 0; }),
                  ddpkit::InvalidArgument);
}

TEST_CASE("impossible samplers are refused", "[sampler]") {
  CHECK_THROWS_AS(DistributedSampler(0, 2, 0), ddpkit::InvalidArgument);
  CHECK_THROWS_AS(DistributedSampler(3, 4, 0, {.drop_last = true}), ddpkit::InvalidArgument);
  CHECK_THROWS_AS(DistributedSampler(3, 2, 2), ddpkit::InvalidArgument);
}

TEST_CASE("A forgotten set_epoch is warned of, once, on rank 0", "[sampler]") {
  const auto epoch = [](DistributedSampler& sampler) {
    sampler.reset();  // A data loader's begin() does this.
    while (sampler.next(4)) {
    }
  };
  for (const bool shuffle : {true, false}) {
    for (const int rank : {0, 1}) {
      for (const bool forgets : {true, false}) {
        DistributedSampler sampler(20, 2, rank, {.shuffle = shuffle});
        const std::string text = ddpkit::testing::stderr_of([&] {
          for (std::uint64_t e = 0; e < 3; ++e) {
            if (!forgets) sampler.set_epoch(e);
            epoch(sampler);
          }
        });
        CAPTURE(shuffle, rank, forgets, text);
        const bool warns = shuffle && rank == 0 && forgets;
        CHECK((text.find("sampler.set_epoch(epoch)") != std::string::npos) == warns);
        CHECK(std::count(text.begin(), text.end(), '\n') == (warns ? 1 : 0));
      }
    }
  }
}
