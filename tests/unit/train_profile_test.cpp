// The phases of updates in a timeline's file.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "support/catch.h"
#include "support/folder.h"
#include "train/profile_window.h"

using ddpkit::testing::Folder;
using ddpkit::testing::write_file;
using ddpkit::train::Phases;

namespace {

std::string event(const std::string& name, int track, double begin, double end, int step = 0, int rank = 0) {
  return fmt::format(R"({{"name":"{}","ph":"X","pid":{},"tid":{},"ts":{},"dur":{},"args":{{"step":{}}}}})", name, rank,
                     track, begin, end - begin, step);
}

Phases phases_of(const std::vector<std::string>& events) {
  const Folder folder;
  write_file(folder / "trace.json",
             fmt::format(R"({{"traceEvents":[{{"name":"rank 0","ph":"M"}},{}]}})", fmt::join(events, ",")));
  return ddpkit::train::read_phases((folder / "trace.json").string());
}

void check(const Phases& phases, double data, double forward, double backward, double exchange, double update) {
  CHECK(phases.data == Approx(data));
  CHECK(phases.forward == Approx(forward));
  CHECK(phases.backward == Approx(backward));
  CHECK(phases.exchange == Approx(exchange));
  CHECK(phases.update == Approx(update));
}

}  // namespace

TEST_CASE("the phases of a step end at the last gradient and at the end of its reduction", "[profile]") {
  const std::vector<std::string> step = {event("step", 0, 100, 200),        event("broadcast buffers", 0, 110, 113),
                                         event("forward", 0, 113, 130),     event("backward", 0, 135, 180, 7),
                                         event("bucket 0", 1, 150, 170, 7), event("bucket 1", 2, 160, 180, 7),
                                         event("update", 0, 185, 195)};
  check(phases_of(step), 10, 25, 25, 20, 20);
  // Events outside of the steps, such as those of an evaluation, do not count. Each rank has its events.
  std::vector<std::string> more = step;
  more.insert(more.end(), {event("forward", 0, 210, 260), event("step", 0, 300, 310, 0, 1)});
  const Phases two = phases_of(more);
  check(two, 20, 25, 25, 20, 20);
  CHECK(two.updates == 2);
  CHECK(two.total() == Approx(110));
}

TEST_CASE("a backward between two forward passes keeps its gradients", "[profile]") {
  check(phases_of({event("step", 0, 0, 100), event("forward", 0, 10, 20), event("forward", 0, 40, 52),
                   event("backward", 0, 60, 90, 0), event("bucket 0", 1, 85, 90, 0)}),
        10, 10 + 20, 20 + 25, 5, 10);
  // Without an exchange, as in a step whose loss is not finite: the rest is backward and update.
  check(phases_of({event("step", 0, 0, 100), event("forward", 0, 10, 20), event("update", 0, 70, 90)}), 10, 60, 0, 0,
        30);
  // A second forward pass after the exchange: the update was repeated.
  check(phases_of({event("step", 0, 0, 100), event("forward", 0, 10, 20), event("backward", 0, 20, 40, 0),
                   event("bucket 0", 1, 30, 40, 0), event("forward", 0, 50, 60), event("backward", 0, 60, 80, 1),
                   event("bucket 0", 1, 75, 80, 1)}),
        10, 20, 10 + 15, 10 + 5, 10 + 20);
}

TEST_CASE("without a wrapper, only the update is known", "[profile]") {
  const Phases phases = phases_of({event("step", 0, 0, 4000), event("update", 0, 3000, 3900)});
  check(phases, 3000, 0, 0, 0, 1000);
  CHECK(ddpkit::train::phase_table(phases, 1, /*has_wrapper=*/false) ==
        "profile: 1 updates            ms       %\n"
        "data to backward           3.000    75.0\n"
        "update                     1.000    25.0\n"
        "total                      4.000   100.0");
}
