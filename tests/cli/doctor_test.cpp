// Tests that `ddpkit doctor` reports real faults.
#include <unistd.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include <fmt/format.h>

#include "cli/run_ddpkit.h"
#include "comm/host.h"
#include "doctor/gpus.h"
#include "doctor/host.h"
#include "doctor/model.h"
#include "support/port.h"

using namespace ddpkit::cli;
using ddpkit::testing::Folder;
using ddpkit::testing::Run;
using ddpkit::testing::run_ddpkit;
using ddpkit::testing::TakenPort;
using ddpkit::testing::write_file;

namespace {

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

HostLimits good_host() {
  return {.cores = 8,
          .cores_of_host = 8,
          .memory = 32 * kGiB,
          .available = 30 * kGiB,
          .shm = kGiB,
          .open_files = 4096,
          .huge_pages = "advise"};
}

/// Returns the finding that contains `words`. Fails the test if there is none.
Finding about(const Findings& findings, const std::string& words) {
  for (const Finding& finding : findings) {
    if (finding.what.find(words) != std::string::npos) return finding;
  }
  FAIL("no finding contains \"" << words << "\"");
  return {};
}

nlohmann::json finding_of(const Run& run, const std::string& words) {
  REQUIRE(run.lines.size() == 1);
  const auto document = nlohmann::json::parse(run.lines[0]);
  for (const auto& finding : document["findings"]) {
    if (finding["what"].get<std::string>().find(words) != std::string::npos) return finding;
  }
  FAIL(run.lines[0] << " has no finding with \"" << words << '"');
  return {};
}

}  // namespace

TEST_CASE("a suitable host gets no advice", "[doctor]") {
  for (const Finding& finding : examine_host(good_host(), 4, std::nullopt, true)) {
    CAPTURE(finding.what);
    CHECK(finding.severity == Severity::kFine);
    CHECK(finding.advice.empty());
  }
}

TEST_CASE("limits of a host are reported", "[doctor]") {
  HostLimits host = good_host();
  CHECK(
      about(examine_host(host, 4, "8", false), "32 threads share 8 cores").advice.starts_with("Set OMP_NUM_THREADS=2"));
  CHECK(about(examine_host(host, 4, "2", false), "fits the cores").severity == Severity::kFine);
  CHECK(about(examine_host(host, 4, "many", false), "\"many\"").severity == Severity::kProblem);
  CHECK(about(examine_host(host, 16, std::nullopt, false), "16 ranks share 8 cores").severity == Severity::kAdvice);
  CHECK(about(examine_host(host, 16, std::nullopt, false), "16 ranks share").advice.starts_with("Start at most 8 CPU"));
  CHECK(about(examine_host(host, 16, std::nullopt, true), "16 ranks share").advice.find("each GPU") !=
        std::string::npos);
  host.cpu_quota = 2.5;
  CHECK(about(examine_host(host, 4, std::nullopt, false), "4 ranks share 2.5 cores").severity == Severity::kAdvice);
  host.memory_limit = kGiB;
  CHECK(host.usable_memory() == kGiB);
  CHECK(about(examine_host(host, 4, std::nullopt, false), "the container's limit is 1.0 GiB").severity ==
        Severity::kFine);
  CHECK(about(examine_host(host, 4, std::nullopt, false), "only 1.0 GiB").advice.find("docker run --memory") !=
        std::string::npos);
  CHECK(about(examine_host(host, 8, std::nullopt, false), "the container's limit").severity == Severity::kProblem);
  host.shm = 64 << 10;
  CHECK(about(examine_host(host, 2, std::nullopt, false), "/dev/shm holds 64 KiB").severity == Severity::kFine);
  CHECK(about(examine_host(host, 2, std::nullopt, true), "/dev/shm holds 64 KiB").advice.find("--shm-size") !=
        std::string::npos);
}

TEST_CASE("an address space that is too small for the ranks is one finding", "[doctor]") {
  HostLimits host = good_host();
  host.address_limit = 600 << 20;
  const Findings findings = examine_host(host, 2, std::nullopt, false);
  CHECK(std::count_if(findings.begin(), findings.end(), [](const Finding& f) { return !f.advice.empty(); }) == 1);
  const Finding finding = about(findings, "a process may map 600.0 MiB (RLIMIT_AS), but LibTorch alone maps");
  CHECK(finding.severity == Severity::kProblem);
  CHECK(finding.advice.find("ulimit -v unlimited") != std::string::npos);
  host.address_limit = 4 * kGiB;
  CHECK(can_train(examine_host(host, 2, std::nullopt, false)));
  const Finding shrinks = about(examine_host(host, 4, std::nullopt, false), "the arena of gradients shrinks");
  CHECK(shrinks.severity == Severity::kAdvice);
}

TEST_CASE("invalid UTF-8 and missing advice are written as JSON", "[doctor]") {
  const auto document = nlohmann::json::parse(doctor_json({{"network", Severity::kFine, "the host \xff"}}));
  CHECK(document["to_do"] == nlohmann::json::array());
  CHECK(document["findings"][0]["what"] == "the host \xEF\xBF\xBD");
}

TEST_CASE("limits of control groups, new and old", "[doctor]") {
  const Folder root;
  write_file(root / "proc/meminfo", "MemTotal: 33554432 kB\nMemFree: 1 kB\nMemAvailable: 31457280 kB\n");
  SECTION("version 2: the least of the group and those around it") {
    write_file(root / "proc/self/cgroup", "0::/docker/abc\n");
    write_file(root / "sys/fs/cgroup/cgroup.controllers", "cpu memory\n");
    write_file(root / "sys/fs/cgroup/docker/memory.max", "1073741824\n");
    write_file(root / "sys/fs/cgroup/docker/memory.current", "805306368\n");
    write_file(root / "sys/fs/cgroup/docker/memory.stat", "anon 1\ninactive_file 134217728\nactive_file 134217728\n");
    write_file(root / "sys/fs/cgroup/docker/abc/memory.max", "max\n");
    write_file(root / "sys/fs/cgroup/docker/abc/cpu.max", "150000 100000\n");
  }
  SECTION("version 2, seen from within its own namespace") {
    write_file(root / "proc/self/cgroup", "0::/\n");
    write_file(root / "sys/fs/cgroup/cgroup.controllers", "cpu memory\n");
    write_file(root / "sys/fs/cgroup/memory.max", "1073741824\n");
    write_file(root / "sys/fs/cgroup/memory.current", "536870912\n");
    write_file(root / "sys/fs/cgroup/cpu.max", "150000 100000\n");
  }
  SECTION("version 1") {
    write_file(root / "proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/a\n0::/a\n");
    write_file(root / "sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1073741824\n");
    write_file(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    write_file(root / "sys/fs/cgroup/memory/a/memory.usage_in_bytes", "805306368\n");
    write_file(root / "sys/fs/cgroup/memory/a/memory.stat", "total_inactive_file 268435456\n");
    write_file(root / "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "150000\n");
    write_file(root / "sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n");
  }
  const HostLimits limits = read_host_limits(root.path());
  CHECK(limits.memory == 32 * kGiB);
  CHECK(limits.memory_limit == kGiB);
  CHECK(ddpkit::available_memory(root.path()) == kGiB / 2);
  CHECK(limits.cpu_quota == 1.5);
}

TEST_CASE("GPUs that cannot be used are a problem, with the reason", "[doctor]") {
  const GpuSystem none;
  CHECK(about(examine_gpus(none, "", false, 0), "no NVIDIA driver").severity == Severity::kFine);
  GpuSystem two{.driver = "580.1", .links = {"GPU 0 - GPU 1: PCIe, no peer access"}};
  two.gpus.assign(2, {.name = "H100", .free_bytes = 70 * kGiB, .total_bytes = 80 * kGiB, .compute_major = 9});
  const Finding hidden = about(examine_gpus(two, "", true, 0), "CUDA_VISIBLE_DEVICES is empty: it hides all 2 GPUs");
  CHECK(hidden.severity == Severity::kProblem);
  CHECK(about(examine_gpus(two, std::nullopt, true, 0), "LibTorch can use none").severity == Severity::kProblem);
  CHECK(about(examine_gpus(two, std::nullopt, false, 0), "built for CPUs").severity == Severity::kAdvice);
  CHECK(about(examine_gpus(two, std::nullopt, true, 2), "not all GPUs are joined by NVLink").severity ==
        Severity::kAdvice);
  CHECK(can_train(examine_gpus(two, "0", true, 1)));
  two.gpus[1].free_bytes = kGiB;
  CHECK(about(examine_gpus(two, std::nullopt, true, 2), "GPU 1 is more than half full").severity == Severity::kAdvice);
}

TEST_CASE("whether a model fits, item by item", "[doctor]") {
  ModelPlan plan{.parameters = 1e9, .ranks = 8};
  double total = 0;
  for (const MemoryItem& item : memory_items(plan, true)) total += item.bytes;
  CHECK(total == Approx(16e9 + 1000 * (1 << 20)));
  CHECK(can_train(examine_model(plan, "H100", 80e9, true)));
  const Findings small = examine_model(plan, "T4", 15e9, true);
  CHECK_FALSE(can_train(small));
  CHECK(small.back().advice.find("ShardedOptimizer") != std::string::npos);
  plan.sharded = true;
  CHECK(can_train(examine_model(plan, "T4", 15e9, true)));
  // All CPU ranks share one memory.
  CHECK_FALSE(can_train(examine_model({.parameters = 1e9, .ranks = 2}, "memory", 30e9, false)));
  CHECK(can_train(examine_model({.parameters = 1e9, .ranks = 1}, "memory", 30e9, false)));
  // Each rank has a quarter of weights, gradients and state, and five times the unit.
  const ModelPlan fsdp{.parameters = 1e9, .fsdp_unit = 0.02, .ranks = 4};
  total = 0;
  for (const MemoryItem& item : memory_items(fsdp, false)) total += item.bytes;
  CHECK(total == Approx(16e9 / 4 + 5 * 4e9 * 0.02 + 150 * (1 << 20)));
  CHECK(can_train(examine_model(fsdp, "memory", 20e9, false)));
  // On a GPU, the next unit is gathered beside the unit in use, and gradients of two units are being reduced.
  total = 0;
  for (const MemoryItem& item : memory_items(fsdp, true)) total += item.bytes;
  CHECK(total == Approx(16e9 / 4 + 8 * 4e9 * 0.02 + 1000 * (1 << 20)));
  const Findings on_gpu = examine_model({.parameters = 1e9, .sharded = true, .ranks = 4}, "GPU", 8e9, true);
  CHECK(on_gpu.back().advice.find("FullyShardedDataParallel") != std::string::npos);
  const Findings whole = examine_model({.parameters = 1e9, .ranks = 4}, "memory", 20e9, false);
  CHECK_FALSE(can_train(whole));
  CHECK(whole.back().advice.find("FullyShardedDataParallel") != std::string::npos);
}

TEST_CASE("ddpkit doctor finds nothing wrong here, and all-reduces", "[doctor]") {
  const Folder folder;
  const Run run = run_ddpkit(folder, {"doctor", "--json", "--params", "1M", "--master-port", "0"});
  CHECK(run.exit_code == 2);  // Port 0 is invalid.
  const TakenPort other;
  const Run good = run_ddpkit(
      folder, {"doctor", "--json", "--params", "1M", "--master-addr", "192.0.2.1", "--master-port", "29500"});
  INFO(good.errors);
  REQUIRE(good.exit_code == 0);
  CHECK(finding_of(good, "ranks, shm")["what"].get<std::string>().find("4 KiB in") != std::string::npos);
  CHECK(finding_of(good, "192.0.2.1:29500 is on another host")["severity"] == "fine");
  CHECK(finding_of(good, "fits into the")["severity"] == "fine");
}

TEST_CASE("ddpkit doctor reports faults", "[doctor]") {
  const Folder folder;
  const TakenPort taken;
  const Run port = run_ddpkit(folder, {"doctor", "--json", "--master-port", std::to_string(taken.port())});
  CHECK(port.exit_code == 1);
  CHECK(finding_of(port, "127.0.0.1:" + std::to_string(taken.port()))["severity"] == "problem");

  for (const std::string wrong : {"29500abc", "4294996796", "0", "-1"}) {
    const Run refused = run_ddpkit(folder, {"doctor"}, {{"MASTER_PORT", wrong}});
    CHECK(refused.exit_code == 1);
    CHECK(refused.errors == "ddpkit: MASTER_PORT is \"" + wrong + "\", which is no number between 1 and 65535\n");
  }
  const Run bytes = run_ddpkit(folder, {"doctor", "--json"}, {{"MASTER_ADDR", "\xff"}});
  CHECK(bytes.exit_code == 1);
  CHECK(finding_of(bytes, "does not resolve")["severity"] == "problem");

  const Run name = run_ddpkit(folder, {"doctor", "--json", "--master-addr", "no.such.host.invalid"});
  CHECK(name.exit_code == 1);
  CHECK(finding_of(name, "no.such.host.invalid does not resolve")["severity"] == "problem");

  const std::vector<std::string> elsewhere = {"doctor", "--json", "--master-addr", "192.0.2.1"};
  const Run threads = run_ddpkit(folder, elsewhere, {{"OMP_NUM_THREADS", "512"}});
  CHECK(threads.exit_code == 0);
  CHECK(finding_of(threads, "OMP_NUM_THREADS=512")["severity"] == "advice");

  const Run hidden = run_ddpkit(folder, elsewhere, {{"CUDA_VISIBLE_DEVICES", ""}});
  finding_of(hidden, "CUDA_VISIBLE_DEVICES is");

  // A model too large for any machine.
  const Run large = run_ddpkit(folder, {"doctor", "--json", "--master-addr", "192.0.2.1", "--params", "1000000G"});
  CHECK(large.exit_code == 1);
  CHECK(finding_of(large, "does not fit")["severity"] == "problem");
}

TEST_CASE("ddpkit doctor under a memory limit of 1 GB", "[doctor]") {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  DDPKIT_SKIP("a sanitizer's shadow memory takes terabytes of address space");
#endif
  const Folder folder;
  const std::string command =
      fmt::format("ulimit -v 1048576; exec {} doctor --json --master-addr 192.0.2.1 --params 60M > {} 2> {}",
                  DDPKIT_TEST_CLI, (folder / "out").string(), (folder / "errors").string());
  const int status = std::system(command.c_str());
  INFO(ddpkit::testing::read_file(folder / "errors"));
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 1);  // 60 M parameters with Adam alone need 1 GB.
  const Run run{.exit_code = 1, .lines = {ddpkit::testing::read_file(folder / "out")}, .errors = {}};
  CHECK(finding_of(run, "RLIMIT_AS is 1.0 GiB")["severity"] == "fine");
  CHECK(finding_of(run, "the arena of gradients shrinks")["severity"] == "advice");
  CHECK(finding_of(run, "does not fit")["severity"] == "problem");
}

TEST_CASE("ddpkit doctor with a /dev/shm of 64 KB", "[doctor]") {
  if (std::system("unshare --mount true 2> /dev/null") != 0) DDPKIT_SKIP("mounting needs root and namespaces");
  const Folder folder;
  const std::string command = fmt::format(
      "unshare --mount sh -c 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec {} doctor --json --master-addr "
      "192.0.2.1' "
      "> {} 2> {}",
      DDPKIT_TEST_CLI, (folder / "out").string(), (folder / "errors").string());
  const int status = std::system(command.c_str());
  INFO(ddpkit::testing::read_file(folder / "errors"));
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  const Run run{.exit_code = 0, .lines = {ddpkit::testing::read_file(folder / "out")}, .errors = {}};
  finding_of(run, "/dev/shm holds 64 KiB");
  CHECK(finding_of(run, "ranks, shm")["severity"] == "fine");  // The option is not needed.
}
