// Runs that are killed and resume.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ddpkit/train/random.h>

#include "video_program.h"

using namespace video::testing;

TEST_CASE("a video run killed anywhere and started again ends with the bits of one never killed", "[video][.long]") {
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    const Folder whole, killed;
    const auto arguments = [&](const Folder& folder) {
      return joined(quick(), {"--epochs", "10", "--checkpoint-steps", "1", "--save-dir", folder.path()});
    };
    const Run undisturbed = run_video(ranks, arguments(whole));
    REQUIRE(undisturbed.exit_code == 0);
    const std::int64_t steps = ddpkit::train::read_checkpoint_info(whole / "checkpoint.pt").step / 10;
    bool was_within = false;
    const auto runs = run_until_not_killed(
        ranks, undisturbed, [&](const Kill& kill) { return run_video(ranks, arguments(killed), kill); },
        [&] { was_within = was_within || is_within_epoch(killed / "checkpoint.pt", steps); }, killed / "checkpoint.pt");
    CHECK(runs.kills > 0);
    CHECK(was_within);
    for (const char* name : {"checkpoint.pt", "best.pt"})
      CHECK(same_bits(weights_in(whole / name), weights_in(killed / name)));
  }
}

TEST_CASE("a video run on another number of ranks resumes with the learning rate for its fraction of the run",
          "[video]") {
  const auto arguments = [](const Folder& folder, const Arguments& more) {
    return joined(joined(quick(), {"--epochs", "5", "--lr-scaling", "none", "--save-dir", folder.path()}), more);
  };
  for (const auto& [before, after] : {std::pair{1, 3}, std::pair{3, 1}}) {
    CAPTURE(before, after);
    const Folder whole, parts;
    const Run undisturbed = run_video(after, arguments(whole, {}));
    REQUIRE(undisturbed.exit_code == 0);
    const std::int64_t updates = run_video(before, joined(quick(), {"--epochs", "1"})).json(0)["step"];
    REQUIRE(run_video(before, arguments(parts, {"--max-steps", std::to_string(2 * updates)})).exit_code == 0);
    CHECK(ddpkit::train::read_checkpoint_info(parts / "checkpoint.pt").epoch == 2);
    const Run rest = run_video(after, arguments(parts, {}));
    INFO(rest.errors);
    REQUIRE(rest.exit_code == 0);
    REQUIRE(rest.lines.size() >= 3);
    for (std::size_t epoch = 2; epoch < 5; ++epoch) {
      CHECK(rest.json(epoch - 2)["epoch"] == epoch + 1);
      CHECK(rest.json(epoch - 2)["lr"] == undisturbed.json(epoch)["lr"]);
      CHECK(rest.json(epoch - 2)["lr"] > 0);
    }
  }
}

TEST_CASE("a video run is known by its data, however its folder is written", "[video]") {
  const Folder folder;
  for (const char* name : {"a", "b"})
    std::filesystem::copy(generated(), folder / name, std::filesystem::copy_options::recursive);
  const auto arguments = [&](const std::string& data, const char* epochs) {
    return joined(quick(folder / data), {"--epochs", epochs, "--save-dir", folder / "run"});
  };
  REQUIRE(run_video(1, arguments("a/", "1")).exit_code == 0);
  check_refused(arguments("b/", "1"), 1, "already holds a run with data_set \"a\" (this one: \"b\")", {1});
  REQUIRE(run_video(1, arguments("a", "2")).exit_code == 0);
  CHECK(ddpkit::train::read_checkpoint_info(folder / "run/checkpoint.pt").epoch == 2);
}

TEST_CASE("kill -9 while a video checkpoint is written leaves the previous or the new one", "[video]") {
  // A child writes checkpoints of epochs 1, 2, ... without pause. The kill comes at a random moment, nearly always
  // within a write.
  const char* wanted = std::getenv("DDPKIT_TEST_KILLS");
  const int kills = std::max(50, wanted ? std::atoi(wanted) : 0);
  const Folder folder;
  const auto path = folder / "checkpoint.pt";
  at::set_num_threads(1);  // After fork(), the child has no other threads.
  torch::manual_seed(0);
  video::Classifier model({.classes = 8, .width = 4});
  ddpkit::optim::FusedAdamW optimizer(model.parameters());
  const auto write = [&](std::int64_t epoch) {
    const torch::NoGradGuard no_grad;
    for (const at::Tensor& parameter : model.parameters()) parameter.fill_(static_cast<double>(epoch));
    ddpkit::train::write_checkpoint(path, model, optimizer, {.epoch = epoch, .step = epoch});
  };
  write(0);
  ddpkit::train::Random random(1);
  std::int64_t last = 0;
  int within = 0;
  for (int kill = 0; kill < kills; ++kill) {
    int done[2];
    REQUIRE(::pipe(done) == 0);
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      ::close(done[0]);
      for (std::int64_t epoch = last + 1;; ++epoch) {
        write(epoch);
        if (::write(done[1], &epoch, sizeof epoch) != sizeof epoch) ::_exit(1);
      }
    }
    ::close(done[1]);
    ::usleep(static_cast<useconds_t>(random.uniform(2'000, 60'000)));
    ::kill(child, SIGKILL);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    REQUIRE(WIFSIGNALED(status));
    std::int64_t finished = last;
    for (std::int64_t epoch = 0; ::read(done[0], &epoch, sizeof epoch) == sizeof epoch;) finished = epoch;
    ::close(done[0]);
    within += std::filesystem::exists(path.string() + ".tmp");

    video::Classifier loaded({.classes = 8, .width = 4});
    ddpkit::optim::FusedAdamW loaded_optimizer(loaded.parameters());
    const auto info = ddpkit::train::read_checkpoint(path, loaded, loaded_optimizer);
    CHECK(info.epoch >= finished);
    CHECK(info.epoch <= finished + 1);
    for (const at::Tensor& parameter : loaded.parameters())
      CHECK(parameter.eq(static_cast<double>(info.epoch)).all().item<bool>());
    last = info.epoch;
  }
  CHECK(within > 0);  // At least one kill must hit a write.
  CHECK(last > 0);
}
