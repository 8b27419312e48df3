#include <ddpkit/error.h>

#include "launch/numa_binding.h"
#include "support/catch.h"
#include "support/folder.h"

using ddpkit::NumaBinding;
using ddpkit::launcher::divide_cores;
using ddpkit::launcher::numa_nodes;
using ddpkit::launcher::parse_cores;
using Cores = std::vector<int>;
using Nodes = std::vector<std::vector<int>>;

TEST_CASE("lists of cores are read as Linux writes them", "[launch]") {
  CHECK(parse_cores("0-3,8") == Cores{0, 1, 2, 3, 8});
  CHECK(parse_cores("5") == Cores{5});
  CHECK(parse_cores("").empty());
  for (const std::string wrong : {"a", "3-1", "0-", "1;2", "0-99999999", "-1"}) {
    CAPTURE(wrong);
    CHECK_THROWS_AS(parse_cores(wrong), ddpkit::InvalidArgument);
  }
}

TEST_CASE("NUMA nodes hold the cores that may be used", "[launch]") {
  const ddpkit::testing::Folder root;
  const auto nodes = root.path() / "sys/devices/system/node";
  ddpkit::testing::write_file(nodes / "node0/cpulist", "0-3\n");
  ddpkit::testing::write_file(nodes / "node10/cpulist", "8-9\n");
  ddpkit::testing::write_file(nodes / "node2/cpulist", "4-7\n");
  CHECK(numa_nodes({0, 1, 5, 8, 9}, root.path()) == Nodes{{0, 1}, {5}, {8, 9}});
  CHECK(numa_nodes({0, 1}, root.path() / "none") == Nodes{{0, 1}});
}

TEST_CASE("ranks share the cores out", "[launch]") {
  const Nodes two = {{0, 1, 2, 3}, {4, 5, 6, 7}};
  CHECK(divide_cores(two, 2, NumaBinding::kNone) == Nodes{{}, {}});
  CHECK(divide_cores(two, 4, NumaBinding::kNode) == Nodes{two[0], two[0], two[1], two[1]});
  CHECK(divide_cores(two, 4, NumaBinding::kExclusive) == Nodes{{0, 1}, {2, 3}, {4, 5}, {6, 7}});
  CHECK(divide_cores(two, 3, NumaBinding::kExclusive) == Nodes{{0, 1}, {2, 3}, {4, 5, 6, 7}});
  CHECK(divide_cores({{0, 1}}, 2, NumaBinding::kNode) == Nodes{{}, {}});
  CHECK(divide_cores({{0, 1}}, 2, NumaBinding::kExclusive) == Nodes{{0}, {1}});
  // Fewer cores than ranks: no rank has an exclusive core.
  CHECK(divide_cores({{0, 1}}, 3, NumaBinding::kExclusive) == Nodes{{}, {}, {}});
}
