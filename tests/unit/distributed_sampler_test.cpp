#include <torch/torch.h>

#include <algorithm>
#include <set>
#include <sstream>

#include <ddpkit/comm/error.h>
#include <ddpkit/data/distributed_sampler.h>

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

TEST_CASE("a loaded sampler goes on with the next sample", "[sampler]") {
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

TEST_CASE("Any number of ranks goes on where another number stopped, each sample once", "[sampler]") {
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
        sampler.set_epoch(2);  // As a loop over epochs does.
        sampler.reset();       // As a data loader does.
        Indices taken;
        while (const auto batch = sampler.next(4)) taken.insert(taken.end(), batch->begin(), batch->end());
        CHECK(taken == rest);
        seen.insert(taken.begin(), taken.end());
        left += taken.size();
        // The next epoch is whole again.
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

TEST_CASE("Who takes the indices ahead says how many were used", "[sampler]") {
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
  DistributedSampler dropping(10, 4, 1, {.drop_last = true});
  CHECK_THROWS_WITH(dropping.set_position(3), "there is no sample 3 where 2 are left");
  dropping.set_position(2);
  DistributedSampler shorter(5, 1, 0);
  CHECK_THROWS_WITH(load(shorter, saved(third)), "the saved sampler stands at sample 14, but an epoch has only 5 here");
}

TEST_CASE("impossible samplers are refused", "[sampler]") {
  CHECK_THROWS_AS(DistributedSampler(0, 2, 0), ddpkit::InvalidArgument);
  CHECK_THROWS_AS(DistributedSampler(3, 4, 0, {.drop_last = true}), ddpkit::InvalidArgument);
  CHECK_THROWS_AS(DistributedSampler(3, 2, 2), ddpkit::InvalidArgument);
}

TEST_CASE("A forgotten set_epoch is warned of, once, on rank 0", "[sampler]") {
  const auto epoch = [](DistributedSampler& sampler) {
    sampler.reset();  // As a data loader's begin() does.
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
