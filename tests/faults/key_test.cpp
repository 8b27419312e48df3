// The key of the store, from the launcher to the ranks.
#include <filesystem>
#include <fstream>

#include "faults/fault_run.h"
#include "support/catch.h"
#include "support/port.h"

using namespace ddpkit::testing;
using Arguments = std::vector<std::string>;

namespace {

std::string free_port() { return std::to_string(TakenPort().port()); }

std::string key_file(const Folder& folder, const std::string& name, char byte, unsigned mode = 0600) {
  const std::string file = folder / name;
  write_file(file, std::string(32, byte));
  std::filesystem::permissions(file, std::filesystem::perms(mode));
  return file;
}

Arguments host(int number, const std::string& port, const Arguments& more = {}) {
  Arguments arguments{
      "-n", "2", "--nnodes", "2", "--node-rank", std::to_string(number), "--master-addr", "localhost", "--master-port",
      port};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

const Arguments kShort{"--steps", "5", "--timeout", "20", "--backend", "gloo"};

}  // namespace

TEST_CASE("the key reaches the ranks through wrappers, and is in no command line or variable", "[faults]") {
  const FaultFolder folder;
  const std::string inner = "exec \"$@\"", outer = "sh -c '" + inner + "' sh \"$0\" \"$@\"; exit $?";
  FaultRun run({"run", "-n", "2", "--", "bash", "-c", outer, DDPKIT_TEST_FAULT_WORKER, "--folder",
                folder.path().string(), "--steps", "5"});
  CHECK(run.wait() == 0);
  CAPTURE(run.err());
  CHECK(run.out() == "done after 5 steps\n");

  // Prints what a process of the rank can read besides the descriptor, and the descriptor itself.
  FaultRun shown({"run", "-n", "1", "--", "sh", "-c",
                  "tail -c 34 /proc/self/fd/$DDPKIT_KEY_FD >/dev/null || exit 3; "
                  "test -z \"$DDPKIT_KEY_FILE\" || exit 4; echo $DDPKIT_KEY_FD; "
                  "echo x >/proc/self/fd/$DDPKIT_KEY_FD"},
                 {"env", "DDPKIT_KEY_FILE=/absent"});
  CHECK(shown.wait() != 0);  // The seals forbid to write.
  CAPTURE(shown.err());
  CHECK(shown.out().size() <= 4);
  CHECK(std::atoi(shown.out().c_str()) > 2);
}

TEST_CASE("a program that closes the key's descriptor is named", "[faults]") {
  const FaultFolder folder;
  FaultRun run({"run", "-n", "2", "--", "bash", "-c", "eval \"exec $DDPKIT_KEY_FD</dev/null\"; exec \"$0\" \"$@\"",
                DDPKIT_TEST_FAULT_WORKER, "--folder", folder.path().string(), "--steps", "5"});
  CHECK(run.wait() == 1);
  CHECK_THAT(run.err(), ContainsSubstring("does not hold the key of the run") && ContainsSubstring("close_fds=False"));
}

TEST_CASE("programs that serve a store themselves have MASTER_PORT under the launcher", "[faults]") {
  // As Python's torch.distributed: rank 0 serves TCPStore at MASTER_ADDR:MASTER_PORT.
  const FaultFolder folder;
  FaultRun run({"run", "-n", "2", "--", "env", "-u", "DDPKIT_KEY_FD", DDPKIT_TEST_FAULT_WORKER, "--folder",
                folder.path().string(), "--steps", "5"});
  CHECK(run.wait() == 0);
  CAPTURE(run.err());
  CHECK(run.out() == "done after 5 steps\n");
}

TEST_CASE("hosts with one key file train together", "[faults][gloo]") {
  const Folder keys;
  const std::string key = key_file(keys, "key", 'a'), port = free_port();
  const FaultFolder folder;
  FaultRun first(worker_command(folder, host(0, port, {"--key-file", key}), kShort));
  FaultRun second(worker_command(folder, host(1, port, {"--key-file", key}), kShort));
  CHECK(first.wait() == 0);
  CHECK(second.wait() == 0);
  CAPTURE(first.err(), second.err());
  CHECK(first.out() == "done after 5 steps\n");
  CHECK(first.err().find("everybody") == std::string::npos);
}

TEST_CASE("a host with another key is refused", "[faults][gloo]") {
  const Folder keys;
  const std::string port = free_port();
  const FaultFolder folder;
  FaultRun first(worker_command(folder, host(0, port, {"--key-file", key_file(keys, "a", 'a')}), kShort));
  FaultRun second(worker_command(folder, host(1, port, {"--key-file", key_file(keys, "b", 'b')}), kShort));
  CHECK(second.wait() == 1);
  CHECK_THAT(second.err(), ContainsSubstring("its key is not the key of the store; give all hosts the same key file"));
  first.signal(SIGTERM);
  CHECK(first.wait() != 0);
}

TEST_CASE("several hosts without a key file get one warning and train", "[faults][gloo]") {
  const std::string port = free_port();
  const FaultFolder folder;
  FaultRun first(worker_command(folder, host(0, port), kShort)), second(worker_command(folder, host(1, port), kShort));
  CHECK(first.wait() == 0);
  CHECK(second.wait() == 0);
  const std::string warning = "can join this run, because there is no --key-file\n", text = first.err() + second.err();
  CAPTURE(text);
  REQUIRE(text.find(warning) != std::string::npos);
  CHECK(text.find(warning) == text.rfind(warning));
}

TEST_CASE("ranks of other launchers connect with DDPKIT_KEY_FILE", "[faults]") {
  const Folder keys;
  const std::string good = key_file(keys, "good", 'a'), other = key_file(keys, "other", 'b');
  // The variables of MPICH's Hydra. `ddpkit run` only starts the shell.
  const std::string start =
      "unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR TORCHELASTIC_RUN_ID DDPKIT_KEY_FD; second=$1; "
      "shift; "
      "for r in 0 1; do f=$0; [ $r = 0 ] || f=$second; DDPKIT_KEY_FILE=$f PMI_RANK=$r PMI_SIZE=2 MPI_LOCALRANKID=$r "
      "MPI_LOCALNRANKS=2 \"$@\" & done; wait";
  for (const std::string& second : {good, other}) {
    const FaultFolder folder;
    FaultRun run({"run", "-n", "1", "--", "sh", "-c", start, good, second, DDPKIT_TEST_FAULT_WORKER, "--folder",
                  folder.path().string(), "--steps", "5", "--timeout", "5"});
    run.wait();
    CAPTURE(run.err());
    CHECK(run.out() == (second == good ? "done after 5 steps\n" : ""));
    CHECK((run.err().find("its key is not the key of the store") != std::string::npos) == (second == other));
  }
}

TEST_CASE("a key file that others can read, or that is too short, is refused", "[faults]") {
  const Folder keys;
  const auto refusal = [&](const std::string& file) {
    FaultRun run({"run", "-n", "1", "--nnodes", "2", "--master-addr", "localhost", "--master-port", free_port(),
                  "--key-file", file, "--", "true"});
    CHECK(run.wait() == 1);
    return run.err();
  };
  const std::string open = key_file(keys, "open", 'a', 0640), brief = keys / "brief";
  CHECK_THAT(refusal(open), ContainsSubstring("has mode 0640, so other users can access it; run: chmod 600 " + open));
  write_file(brief, "password");
  std::filesystem::permissions(brief, std::filesystem::perms(0600));
  CHECK_THAT(refusal(brief), ContainsSubstring("has 8 bytes, but must have 32 to 4096"));
  CHECK_THAT(refusal(keys / "absent"), ContainsSubstring("No such file or directory"));
  CHECK_THAT(refusal(keys.path()), ContainsSubstring("is not a regular file"));
  FaultRun one_host({"run", "-n", "1", "--key-file", open, "--", "true"});
  CHECK(one_host.wait() == 1);
  CHECK_THAT(one_host.err(), ContainsSubstring("--key-file is for several hosts"));
}
