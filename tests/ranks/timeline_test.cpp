#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include <ddpkit/comm/trace.h>
#include <ddpkit/error.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

#include "support/catch.h"
#include "support/folder.h"
#include "support/ranks.h"

using ddpkit::DistributedDataParallel;
using ddpkit::ProcessGroup;
using ddpkit::Timeline;
using ddpkit::testing::Folder;
using nlohmann::json;

namespace {

constexpr int kSteps = 3;
const std::string kOddName = "update of \"weights\" \\ \n\x01";

torch::nn::Sequential deep_model() {
  torch::manual_seed(0);
  return torch::nn::Sequential(torch::nn::Linear(300, 300), torch::nn::BatchNorm1d(300), torch::nn::Linear(300, 300),
                               torch::nn::Linear(300, 300));
}

/// Trains with small buckets; `timeline` has recorded events and is not written.
void train(const ProcessGroup& group, const Timeline* timeline) {
  auto model = deep_model();
  DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0.3, .first_bucket_cap_mb = 0.3});
  if (timeline) ddp.set_timeline(*timeline);
  torch::optim::SGD optimizer(model->parameters(), 0.01);
  for (int step = 0; step < kSteps; ++step) {
    // The ranks start far apart, so that a wrong clock would show.
    std::this_thread::sleep_for(std::chrono::milliseconds(20 * group.rank()));
    optimizer.zero_grad();
    ddp(torch::randn({16, 300})).sum().backward();
    const auto span = timeline ? std::optional<Timeline::Span>(std::in_place, timeline->span(kOddName)) : std::nullopt;
    optimizer.step();
  }
}

struct Interval {
  double begin = 0, end = 0;
};
/// A rank's complete events by name, in file order. [name][occurrence]
using Events = std::map<std::string, std::vector<Interval>>;

Events check_rank(const json& trace, int rank) {
  Events events;
  std::map<int, std::vector<Interval>> open;  // [track]
  double last = 0;
  for (const json& event : trace.at("traceEvents")) {
    if (event.at("pid") != rank || event.at("ph") != "X") continue;
    const double begin = event.at("ts"), end = begin + event.at("dur").get<double>();
    CHECK(begin >= last);
    CHECK(end >= begin);
    last = begin;
    auto& around = open[event.at("tid")];
    // The file rounds times to nanoseconds.
    while (!around.empty() && around.back().end <= begin + 0.0015) around.pop_back();
    if (!around.empty()) CHECK(end <= around.back().end + 0.0015);
    around.push_back({begin, end});
    events[event.at("name")].push_back({begin, end});
  }
  return events;
}

void check_inside(const Interval& inner, const Interval& outer) {
  CHECK(inner.begin >= outer.begin - 0.0015);
  CHECK(inner.end <= outer.end + 0.0015);
}

/// Checks the events of all ranks in a file that train() wrote.
void check_trace(const std::string& path, int ranks, bool spans) {
  const json trace = json::parse(ddpkit::testing::read_file(path));
  std::vector<Events> of_rank;
  std::vector<std::string> names;
  for (const json& event : trace.at("traceEvents")) {
    if (event.at("name") == "process_name") names.push_back(event.at("args").at("name"));
  }
  REQUIRE(names.size() == static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    CHECK(names[static_cast<std::size_t>(rank)] == "rank " + std::to_string(rank));
    Events events = check_rank(trace, rank);
    REQUIRE(events["forward"].size() == kSteps);
    REQUIRE(events["backward"].size() == kSteps);
    CHECK(events["broadcast buffers"].size() == kSteps);
    CHECK(events[kOddName].size() == (spans ? kSteps : 0));
    REQUIRE(events["bucket 0"].size() == kSteps);
    REQUIRE(events["bucket 1"].size() == kSteps);
    CHECK(events["reduction"].size() >= 2 * kSteps);
    for (std::size_t step = 0; step < kSteps; ++step) {
      CHECK(events["broadcast buffers"][step].end <= events["forward"][step].begin + 0.0015);
      CHECK(events["forward"][step].end <= events["backward"][step].begin + 0.0015);
      check_inside(events["bucket 0"][step], events["backward"][step]);
      check_inside(events["bucket 1"][step], events["backward"][step]);
    }
    of_rank.push_back(std::move(events));
  }
  // All ranks use one clock: no rank has a bucket's result before every rank is ready.
  for (std::size_t step = 0; step < kSteps; ++step) {
    double all_ready = 0;
    for (const Events& events : of_rank) all_ready = std::max(all_ready, events.at("bucket 0")[step].begin);
    for (const Events& events : of_rank) CHECK(events.at("bucket 0")[step].end >= all_ready);
  }
}

}  // namespace

RANK_TEST("a timeline holds all ranks' events, nested, ordered, on one clock", "[ddp][timeline]", 1, 2, 3) {
  const Folder folder;
  const std::string path = folder / "trace.json";
  const Timeline timeline(group, path);
  train(group, &timeline);
  CHECK(timeline.dropped() == 0);
  timeline.write();
  if (group.rank() == 0) check_trace(path, group.world_size(), true);
  // Writes again, with the later events.
  const std::size_t before = timeline.events();
  { const auto span = timeline.span("more"); }
  CHECK(timeline.events() == before + 1);
  timeline.write();
  if (group.rank() == 0) CHECK_THAT(ddpkit::testing::read_file(path), ContainsSubstring("\"more\""));
  group.barrier();
}

RANK_TEST("a timeline is bounded, and reports the events that it omits", "[ddp][timeline]", 2) {
  const Folder folder;
  const std::string path = folder / "trace.json";
  const Timeline timeline(group, path, {.max_events = 5});
  train(group, &timeline);
  CHECK(timeline.events() == 5);
  CHECK(timeline.dropped() > 0);
  timeline.write();
  if (group.rank() == 0)
    CHECK_THAT(ddpkit::testing::read_file(path),
               ContainsSubstring("\"dropped_events\":" + std::to_string(timeline.dropped())));
  group.barrier();
}

RANK_TEST("a timeline that cannot be written is an error on all ranks, at once", "[ddp][timeline]", 2, 3) {
  CHECK_THROWS_WITH(Timeline(group, "/no/such/folder/trace.json"), ContainsSubstring("/no/such/folder"));
  group.barrier();
}

TEST_CASE("DDPKIT_TIMELINE writes the first steps' timeline", "[ranks][ddp][timeline]") {
  const Folder folder;
  const std::string path = folder / "trace.json";
  ddpkit::testing::on_ranks("DDPKIT_TIMELINE writes the first steps' timeline", 2,
                            [](ProcessGroup& group) {
                              train(group, nullptr);
                              train(group, nullptr);
                              if (group.rank() == 0) check_trace(std::getenv("DDPKIT_TIMELINE"), 2, false);
                              group.barrier();
                            },
                            {.environment = {{"DDPKIT_TIMELINE", path}, {"DDPKIT_TIMELINE_STEPS", "3"}}});
}
