// Tests of the command `ddpkit bench collectives`.
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include <fmt/format.h>

#include "bench/row.h"
#include "cli/run_ddpkit.h"
#include "support/catch.h"
#include "support/folder.h"

using ddpkit::testing::Folder;
using ddpkit::testing::names_in;
using ddpkit::testing::read_file;
using ddpkit::testing::Run;
using ddpkit::testing::run_bench;
using ddpkit::testing::split;
using ddpkit::testing::write_file;

TEST_CASE("ddpkit bench collectives measures and checks each collective", "[bench]") {
  const Folder folder;
  const std::string csv = folder / "rows.csv", plot = folder / "plot.svg";
  for (const std::string ranks : {"2", "3"}) {
    const Run run = run_bench(
        folder, {"collectives", "-n",    ranks, "--backend", "shm,limit", "-b",       "4",
                 "-e",          "100K",  "-f",  "64",        "--iters",   "20",       "--warmup",
                 "2",           "--csv", csv,   "--plot",    plot,        "--rounds", ranks == "2" ? "1" : "2"});
    INFO(run.errors);
    REQUIRE(run.exit_code == 0);
    // More rounds do not give more rows.
    CHECK((run.errors.find("round 2 of 2\n") != std::string::npos) == (ranks == "3"));
    const std::vector<std::string> lines = split(read_file(csv), '\n');
    REQUIRE(lines.size() > 10);
    CHECK(lines[0] == ddpkit::bench::kCsvHeader);
    REQUIRE(run.lines.size() == lines.size() + 1);  // The header has two lines.
    std::set<std::string> kinds;
    for (std::size_t i = 1; i < lines.size(); ++i) {
      CAPTURE(lines[i]);
      const auto row = ddpkit::bench::parse_report(lines[i] + ",0");
      REQUIRE(row);
      CHECK(std::to_string(row->ranks) == ranks);
      CHECK(row->us > 0);
      CHECK(ddpkit::bench::to_csv(*row) == ddpkit::bench::to_csv(*ddpkit::bench::parse_report(to_report(*row))));
      CHECK(run.lines[i + 1].ends_with(" 0"));
      CHECK(run.lines[i + 1].starts_with(row->collective + " "));
      kinds.insert(row->collective + " " + row->backend + " " + row->memory);
    }
    for (const char* collective : {"all_reduce", "broadcast", "all_gather"}) {
      for (const char* memory : {"symmetric", "private"})
        CHECK(kinds.count(std::string(collective) + " shm " + memory) == 1);
    }
    CHECK(kinds.count("all_reduce limit symmetric") == 1);
    CHECK_THAT(read_file(plot), ContainsSubstring("all_reduce, " + ranks + " ranks"));
  }
  CHECK(names_in(folder.path()) == std::vector<std::string>{"plot.svg", "rows.csv"});
}

TEST_CASE("ddpkit bench collectives compares Gloo and other libraries, or prints why not", "[bench][gloo]") {
  const Folder folder;
  const std::string csv = folder / "rows.csv";
  // By default, unavailable backends are skipped.
  const Run run = run_bench(folder, {"collectives", "--collective", "all_reduce,all_gather", "-b", "1K", "-e", "64K",
                                     "-f", "64", "--iters", "4", "--warmup", "1", "--rounds", "2", "--csv", csv});
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  const std::string rows = read_file(csv);
  for (const std::string backend : {"gloo", "openmpi", "mpich", "intelmpi", "oneccl"}) {
    const std::string why = "ddpkit bench: " + backend + " skipped: ";
    CHECK(run.errors.find(why) == run.errors.rfind(why));  // Logged once, not in each round.
    if (rows.find(",65536,") != std::string::npos &&
        rows.find("," + backend + ",2,65536,private,") != std::string::npos)
      continue;
    CHECK_THAT(run.errors, ContainsSubstring(why));
  }
  CHECK_THAT(rows, ContainsSubstring("all_reduce,shm,2,65536,symmetric,"));
  CHECK_THAT(rows, ContainsSubstring("all_reduce,limit,2,65536,symmetric,"));
}

TEST_CASE("ddpkit bench replaces a file atomically", "[bench]") {
  const Folder folder;
  const auto measure = [&](const std::string& bytes, const std::string& option, const std::string& file) {
    return run_bench(folder, {"collectives", "--backend", "shm", "--collective", "broadcast", "--iters", "2", "-b",
                              bytes, "-e", bytes, option, file});
  };
  write_file(folder / "rows.csv", "old\n");
  const Run failed = measure("9000G", "--csv", folder / "rows.csv");
  CHECK(failed.exit_code == 1);
  CHECK_THAT(failed.errors, ContainsSubstring("no shared memory"));
  CHECK(read_file(folder / "rows.csv") == "old\n");
  CHECK(names_in(folder.path()) == std::vector<std::string>{"rows.csv"});
  CHECK(measure("4K", "--csv", folder / "rows.csv").exit_code == 0);
  CHECK(read_file(folder / "rows.csv").starts_with("collective,backend,"));
  CHECK(names_in(folder.path()) == std::vector<std::string>{"rows.csv"});
  // The device file remains, and a failed write is reported.
  const Run full = measure("4K", "--csv", "/dev/full");
  CHECK(full.exit_code == 1);
  CHECK_THAT(full.errors, ContainsSubstring("cannot write /dev/full"));
  CHECK(std::filesystem::is_character_file("/dev/full"));
  std::filesystem::create_symlink("/dev/full", folder / "drawing.svg");
  const Run plot = measure("4K", "--plot", folder / "drawing.svg");
  CHECK(plot.exit_code == 1);
  CHECK_THAT(plot.errors, ContainsSubstring("cannot write ") && ContainsSubstring("drawing.svg"));
}

TEST_CASE("ddpkit reports that its output could not be written", "[cli]") {
  const Folder folder;
  for (const char* arguments : {"--version", "--help", "estimate --compute-ms 1 --params 1M", "doctor",
                                "bench collectives --backend shm --collective broadcast -b 4K -e 4K --iters 2"}) {
    CAPTURE(arguments);
    const auto run = [&](const char* where) {
      return std::system(
          fmt::format("{} {} {} 2> {}", DDPKIT_TEST_CLI, arguments, where, (folder / "errors").string()).c_str());
    };
    const int status = run("> /dev/full");
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 1);
    CHECK_THAT(read_file(folder / "errors"), ContainsSubstring("ddpkit: not all of the output could be written"));
  }
  // If stderr fails, the exit code is still set.
  const int unheard = std::system(DDPKIT_TEST_CLI " no-such-command 2> /dev/full");
  CHECK(WIFEXITED(unheard));
  CHECK(WEXITSTATUS(unheard) == 2);
  const int unheard_run = std::system(DDPKIT_TEST_CLI " run -n 2 -- sh -c 'exit 3' 2> /dev/full");
  CHECK(WIFEXITED(unheard_run));
  CHECK(WEXITSTATUS(unheard_run) == 3);
}

TEST_CASE("ddpkit bench refuses wrong options in one sentence, before it measures", "[bench]") {
  const Folder folder;
  const std::vector<std::pair<std::vector<std::string>, std::string>> wrong = {
      {{}, "which benchmark?"},
      {{"steps"}, "unexpected argument 'steps'; the commands are collectives, step"},
      {{"collectives", "--backend", "nccl"}, "--backend nccl has no use for --device cpu"},
      {{"collectives", "-n", "1"}, "at least 2 on the CPU"},
      // Without CUDA, without a GPU, or with too few GPUs.
      {{"collectives", "--device", "cuda", "-n", "4000"}, "--device cuda: "},
      {{"collectives", "--collective", "allreduce"}, "\"allreduce\"; there are all_reduce"},
      {{"collectives", "-n", "0"}, "not '0'"},
      {{"collectives", "-n", "2,x"}, "x"},
      {{"collectives", "-b", "4Q"}, "\"4Q\" is not a size"},
      {{"collectives", "-b", "1M", "-e", "4K"}, "the smallest size, 1 MiB, is above"},
      {{"collectives", "-f", "1"}, "not '1'"},
      {{"collectives", "--iters", "0"}, "not '0'"},
      {{"collectives", "--memory", "shared"}, "shared"},
      {{"collectives", "--plot", "plot.png"}, "SVG"},
      {{"collectives", "--csv", folder / "no-such/rows.csv"}, "cannot write"},
      {{"collectives", "more"}, "more"},
  };
  for (const auto& [arguments, message] : wrong) {
    CAPTURE(arguments);
    const Run run = run_bench(folder, arguments);
    CHECK(run.exit_code == 2);
    CHECK_THAT(run.errors, ContainsSubstring(message));
    CHECK(std::count(run.errors.begin(), run.errors.end(), '\n') == 1);
    CHECK(run.lines.empty());
  }
  CHECK(names_in(folder.path()).empty());
}
