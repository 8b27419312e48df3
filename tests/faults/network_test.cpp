// The fault matrix: a network between two nodes, each in a separate network namespace.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "faults/hosts.h"

using namespace ddpkit::testing;

namespace {

bool sh(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }

/// Two nodes and one cable.
class TwoNodes {
 public:
  TwoNodes() {
    for (int node = 0; node < 2; ++node) there_ = there_ && sh("ip netns add " + name(node));
    there_ = there_ && sh(fmt::format("ip link add eth0 netns {} type veth peer name eth0 netns {}", name(0), name(1)));
    for (int node = 0; node < 2; ++node) {
      there_ = there_ && sh(fmt::format("ip -n {} addr add {}/24 dev eth0", name(node), address(node))) &&
               sh(fmt::format("ip -n {} link set lo up", name(node))) && link(node, "up");
    }
  }
  ~TwoNodes() {
    for (int node = 0; node < 2; ++node) sh("ip netns delete " + name(node));
  }
  bool there() const { return there_; }
  std::string name(int node) const { return fmt::format("ddpkit-{}-{}", ::getpid(), node); }
  static std::string address(int node) { return fmt::format("10.213.7.{}", node + 1); }
  bool link(int node, const std::string& state) const {
    return sh(fmt::format("ip -n {} link set eth0 {}", name(node), state));
  }
  /// One megabit per second: a gradient of the worker takes 0.15 s.
  bool make_slow() const {
    return sh(fmt::format("tc -n {} qdisc add dev eth0 root tbf rate 1mbit burst 10kb latency 400ms", name(0)));
  }

 private:
  bool there_ = true;
};

std::vector<std::string> node_of(int node, const FaultFolder& folder, const std::vector<std::string>& options,
                                 int ranks = 1) {
  return worker_command(folder,
                        {"-n", std::to_string(ranks), "--nnodes", "2", "--node-rank", std::to_string(node),
                         "--master-addr", TwoNodes::address(0)},
                        options);
}

/// Returns when the ranks of `second` train. `first` prints nothing before it ends.
void wait_for_training(FaultRun& first, FaultRun& second) {
  const auto trains = [&] {
    second.signal(SIGUSR1);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    return second.err().find("at step") != std::string::npos;
  };
  while (!trains()) REQUIRE(first.out().empty());
}

}  // namespace

TEST_CASE("ranks of a host whose loopback has only IPv6 train", "[faults]") {
  const std::string name = fmt::format("ddpkit-{}-v6", ::getpid());
  const bool is_made = sh("ip netns add " + name);
  const auto remove = [&](const char*) { sh("ip netns delete " + name); };
  const std::unique_ptr<const char, decltype(remove)> removed("", remove);
  if (!is_made || !sh(fmt::format("ip -n {} link set lo up", name)) ||
      !sh(fmt::format("ip -n {} -4 addr flush dev lo", name)))
    DDPKIT_SKIP("network namespaces need root and iproute2");
  if (!sh(fmt::format("ip -n {} -6 addr show dev lo | grep ::1", name))) DDPKIT_SKIP("this kernel has no IPv6");
  // Without the launcher's key, the ranks connect at the address that another launcher would set.
  const std::vector<std::string> with_key = {"-n", "2"};
  const std::vector<std::string> without_key = {"-n", "2", "--", "env", "--unset=DDPKIT_KEY_FD"};
  using Case = std::pair<std::string, std::vector<std::string>>;
  for (const auto& [backend, launcher] : {Case{"shm", with_key}, Case{"gloo", with_key}, Case{"shm", without_key}}) {
    CAPTURE(backend, launcher);
    const FaultFolder folder;
    FaultRun run(worker_command(folder, launcher, {"--steps", "3", "--backend", backend}),
                 {"ip", "netns", "exec", name});
    CHECK(run.wait() == 0);
    CAPTURE(run.err());
    CHECK_THAT(run.out(), ContainsSubstring("done after 3 steps"));
  }
}

TEST_CASE("a loopback interface that is down is named", "[faults]") {
  const std::string name = fmt::format("ddpkit-{}-down", ::getpid());
  const auto remove = [&](const char*) { sh("ip netns delete " + name); };
  const std::unique_ptr<const char, decltype(remove)> removed("", remove);
  if (!sh("ip netns add " + name)) DDPKIT_SKIP("network namespaces need root and iproute2");
  const FaultFolder folder;
  FaultRun run(worker_command(folder, {"-n", "2"}, {"--steps", "3", "--timeout", "5"}), {"ip", "netns", "exec", name});
  CHECK(run.wait() == 1);
  CAPTURE(run.err());
  CHECK_THAT(run.err(), ContainsSubstring("the loopback interface is down") &&
                            ContainsSubstring("run: ip link set lo up") && !ContainsSubstring("timed out"));
  CHECK(run.orphans() == std::vector<int>());
}

TEST_CASE("two nodes whose link is slow are only slower", "[faults]") {
  const TwoNodes nodes;
  if (!nodes.there()) DDPKIT_SKIP("network namespaces need root and iproute2");
  if (!nodes.make_slow()) DDPKIT_SKIP("this kernel cannot shape traffic (tbf)");
  const FaultFolder folder;
  FaultRun first(node_of(0, folder, {"--steps", "10"}), {"ip", "netns", "exec", nodes.name(0)});
  FaultRun second(node_of(1, folder, {"--steps", "10"}), {"ip", "netns", "exec", nodes.name(1)});
  CHECK(first.wait(std::chrono::seconds(120)) == 0);
  CHECK(second.wait(std::chrono::seconds(120)) == 0);
  CAPTURE(first.err(), second.err());
  CHECK_THAT(first.out(), ContainsSubstring("done after 10 steps"));
  CHECK(first.orphans() == std::vector<int>());
  CHECK(second.orphans() == std::vector<int>());
  add_row("link slow (1 Mbit/s), two nodes on gloo", "only slower: exit code 0", first.seconds());
}

TEST_CASE("a subgroup of ranks on two nodes connects over their link", "[faults]") {
  const TwoNodes nodes;
  if (!nodes.there()) DDPKIT_SKIP("network namespaces need root and iproute2");
  for (const std::string backend : {"gloo", "hierarchical"}) {
    CAPTURE(backend);
    const FaultFolder folder;
    const std::vector<std::string> options = {"--act",    "split", "--at-step", "1",  "--steps",   "2",
                                              "--victim", "-1",    "--timeout", "60", "--backend", backend};
    FaultRun first(node_of(0, folder, options, 2), {"ip", "netns", "exec", nodes.name(0)});
    FaultRun second(node_of(1, folder, options, 2), {"ip", "netns", "exec", nodes.name(1)});
    CHECK(first.wait(std::chrono::seconds(120)) == 0);
    CHECK(second.wait(std::chrono::seconds(120)) == 0);
    CAPTURE(first.err(), second.err());
    // Rank 0 of a node prints to its stdout, the others to its stderr.
    const std::string output = first.out() + first.err() + second.out() + second.err();
    for (const int rank : {0, 1, 2, 3})
      CHECK_THAT(output, ContainsSubstring(
                             fmt::format("rank {} of a part with 1 on its host: {}", rank, rank % 2 == 0 ? 2 : 4)));
  }
}

TEST_CASE("two nodes whose link goes down end with an error within the timeout", "[faults]") {
  const TwoNodes nodes;
  if (!nodes.there()) DDPKIT_SKIP("network namespaces need root and iproute2");
  const FaultFolder folder;
  const std::vector<std::string> options = {"--steps", "1000000", "--act", "slow", "--timeout", "3"};
  FaultRun first(node_of(0, folder, options), {"ip", "netns", "exec", nodes.name(0)});
  FaultRun second(node_of(1, folder, options), {"ip", "netns", "exec", nodes.name(1)});
  folder.pid_of(0);
  folder.pid_of(1);
  wait_for_training(first, second);
  REQUIRE(nodes.link(0, "down"));
  const auto down = std::chrono::steady_clock::now();
  CHECK(first.wait(std::chrono::seconds(120)) == 1);
  CHECK(second.wait(std::chrono::seconds(120)) == 1);
  CAPTURE(first.err(), second.err());
  CHECK_THAT(first.err(), ContainsSubstring(", waiting for rank 1, which does not answer"));
  CHECK_THAT(second.err(), ContainsSubstring(", waiting for rank 0, which does not answer"));
  CHECK(first.orphans() == std::vector<int>());
  CHECK(second.orphans() == std::vector<int>());
  add_row("link down, two nodes on gloo (timeout 3 s)", "an error on both within the timeout, exit code 1",
          std::chrono::duration<double>(std::chrono::steady_clock::now() - down).count());
}

TEST_CASE("a host whose cable is cut is lost on both sides, and only the side with the store continues",
          "[faults][hosts]") {
  struct Case {
    int ranks;  // Of each host.
    const char* backend;
    int least, cut;
  };
  for (const auto& [ranks, backend, least, cut] : {Case{1, "gloo", 2, 0}, Case{1, "gloo", 2, 1}, Case{1, "gloo", 1, 0},
                                                   Case{1, "gloo", 1, 1}, Case{2, "hierarchical", 1, 1}}) {
    CAPTURE(ranks, least, cut);
    const TwoNodes nodes;
    if (!nodes.there()) DDPKIT_SKIP("network namespaces need root and iproute2");
    const Endpoint endpoint;
    const FaultFolder folder;
    // The timeout of the collectives is far longer than the limit of the test.
    std::vector<std::string> command = endpoint.worker(
        folder, {"--nnodes", fmt::format("{}:2", least), "--heartbeat-timeout", "1"},
        {"--steps", "2000", "--act", "slow", "--victim", "0", "--timeout", "600", "--backend", backend}, ranks);
    *(std::ranges::find(command, "--rdzv-endpoint") + 1) = TwoNodes::address(0) + ":29400";
    FaultRun second(command, {"ip", "netns", "exec", nodes.name(1)});
    FaultRun first(command, {"ip", "netns", "exec", nodes.name(0)});
    for (int rank = 0; rank < 2 * ranks; ++rank) folder.pid_of(rank);
    wait_for_training(first, second);
    // The other node sees no carrier: packets are lost, and no connection is closed.
    REQUIRE(nodes.link(cut, "down"));
    const double down = now_seconds();
    first.wait_for(host_name(1) + " has sent no heartbeat for 1.0 s");
    second.wait_for("host 0 (10.213.7.1:29400), which serves the store, is lost; start the same command again");
    const double named = now_seconds();
    CHECK(second.wait() == 75);
    CHECK(first.wait(std::chrono::seconds(120)) == (least == 1 ? 0 : 75));
    CAPTURE(first.err(), second.err());
    CHECK((first.out() == "done after 2000 steps\n") == (least == 1));
    CHECK(first.orphans() == std::vector<int>());
    CHECK(second.orphans() == std::vector<int>());
    add_row(fmt::format("cable of host {} cut, {}, --nnodes {}:2 (heartbeat 1 s)", cut, backend, least),
            "named on both sides; only host 0 may continue", named - down);
  }
}
