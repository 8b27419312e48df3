// Tests of the command `ddpkit bench recovery`.
#include <string>
#include <vector>

#include "bench/recovery_rank.h"
#include "cli/run_ddpkit.h"

using ddpkit::testing::Folder;
using ddpkit::testing::read_file;
using ddpkit::testing::run_bench;
using ddpkit::testing::split;

TEST_CASE("bench recovery measures the loss of a rank without and with a restart", "[bench]") {
  const Folder folder;
  const std::string csv = folder / "rows.csv";
  const auto run = run_bench(folder, {"recovery", "-n", "3", "--rounds", "2", "--model", "mlp-20x2", "--optimizer",
                                      "adamw", "--resident-mib", "0,16", "--csv", csv});
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  const std::vector<std::string> rows = split(read_file(csv), '\n');
  REQUIRE(rows.size() == 5);
  CHECK(rows[0] == "system,ranks,resident_mib,kill_to_step_ms,rejoin_ms,stall_ms");
  CHECK(run.lines.size() == 5);
  for (std::size_t i = 1; i < rows.size(); ++i) {
    const std::vector<std::string> fields = split(rows[i], ',');
    REQUIRE(fields.size() == 6);
    CHECK(fields[0] == (i % 2 == 1 ? "ddpkit-elastic" : "ddpkit-restart"));
    CHECK(fields[1] == "3");
    CHECK(fields[2] == (i <= 2 ? "0" : "16"));
    CHECK(std::stod(fields[3]) > 0);
    for (const std::string& field : {fields[4], fields[5]}) {
      if (i % 2 == 1) {
        CHECK(std::stod(field) > 0);
      } else {
        CHECK(field == "-");
      }
    }
    CHECK(run.lines[i].starts_with(fields[0] + " "));
  }
}

TEST_CASE("bench recovery names what it needs for torchft", "[bench]") {
  const Folder folder;
  const auto none = run_bench(folder, {"recovery", "--peers"}, {{"DDPKIT_PEER_TORCHFT", ""}});
  CHECK(none.exit_code == 2);
  CHECK_THAT(none.errors, ContainsSubstring("needs torchft: let DDPKIT_PEER_TORCHFT name"));
  const auto wrong = run_bench(folder, {"recovery", "-n", "1"});
  CHECK(wrong.exit_code == 2);
  const auto other = run_bench(folder, {"recovery", "--model", "lstm"});
  CHECK(other.exit_code == 2);
  CHECK_THAT(other.errors, ContainsSubstring("bench recovery trains only MLPs, not lstm"));
}
