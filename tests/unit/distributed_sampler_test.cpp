#include <torch/torch.h>

#include <algorithm>
#include <set>

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
