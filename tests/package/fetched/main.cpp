// Uses ddpkit::train and the project's own fmt, next to ddpkit's.
#include <cstdint>
#include <cstdio>

#include <fmt/format.h>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/train/metrics.h>
#include <ddpkit/train/options.h>

int main() {
  std::int64_t count = 0;
  ddpkit::train::Options options("outside", "");
  options.add("count", &count, "");
  options.parse_resolved("count: 1", "the program");
  const auto group = ddpkit::init_process_group();
  const auto sums = ddpkit::train::sum_over_ranks({static_cast<double>(count)}, group);
  if (group.rank() == 0) std::puts(fmt::format(" ranks agree", static_cast<int>(sums[0])).c_str());
}
