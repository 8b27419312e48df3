#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include <ddpkit/error.h>
#include <ddpkit/train/atomic_file.h>
#include <ddpkit/train/run_folder.h>

#include "support/catch.h"
#include "support/folder.h"
#include "support/ranks.h"

using namespace ddpkit::train;
using ddpkit::testing::Folder;
using ddpkit::testing::names_in;
using ddpkit::testing::read_file;
using ddpkit::testing::write_file;

namespace {

const std::string kConfig = R"({"epochs":3,"lr":0.1,"world_size":1})";

// A folder with the checkpoint of a run of three epochs.
struct Run {
  explicit Run(std::int64_t epoch) {
    torch::nn::Linear model(2, 2);
    const torch::optim::SGD optimizer(model->parameters(), 0.1);
    write_checkpoint(path, *model, optimizer, {.epoch = epoch, .step = 10 * epoch, .config = kConfig});
    before = read_file(path);
  }
  RunFolder open(const std::string& config, const RunFolderOptions& options = {}) const {
    return open_run_folder(folder.path(), config, options, ddpkit::init_process_group());
  }
  Folder folder;
  std::filesystem::path path = folder / "checkpoint.pt";
  std::string before;
};

// Sets the environment of attempt `restart` of a job during its lifetime.
struct Attempt {
  explicit Attempt(int restart, const char* job = "one") {
    ::setenv("TORCHELASTIC_RESTART_COUNT", std::to_string(restart).c_str(), 1);
    ::setenv("TORCHELASTIC_MAX_RESTARTS", "4", 1);
    ::setenv("TORCHELASTIC_RUN_ID", job, 1);
  }
  ~Attempt() {
    for (const char* name : {"TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"})
      ::unsetenv(name);
  }
};

}  // namespace

TEST_CASE("a new folder is made, with nothing in it yet", "[run_folder]") {
  const Folder folder;
  const auto group = ddpkit::init_process_group();
  {
    const RunFolder run = open_run_folder(folder / "a/b", kConfig, {}, group);
    CHECK(run.checkpoint == folder / "a/b/checkpoint.pt");
    CHECK_FALSE(run.to_resume);
    CHECK(names_in(folder / "a/b").empty());
  }
  CHECK_THROWS_WITH(open_run_folder(folder / "a/b", kConfig, {.resume = true}, group),
                    ContainsSubstring("cannot resume") && ContainsSubstring("holds no run"));
}

TEST_CASE("runs without a name get numbered folders", "[run_folder]") {
  const Folder folder;
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  CHECK(last_run_folder("mine").empty());
  CHECK_THROWS_WITH(default_run_folder("mine", true), "cannot resume: checkpoints/mine holds no run");
  CHECK(default_run_folder("mine", false) == "checkpoints/mine/run-1");
  std::filesystem::create_directory("checkpoints/mine/run-9");
  write_file("checkpoints/mine/run-10", "");
  std::filesystem::create_directory("checkpoints/mine/run-x");
  CHECK(default_run_folder("mine", false) == "checkpoints/mine/run-11");
  CHECK(default_run_folder("mine", true) == "checkpoints/mine/run-11");
  CHECK(default_run_folder("other", false) == "checkpoints/other/run-1");
  ::setenv("TORCHELASTIC_RESTART_COUNT", "1", 1);
  CHECK(default_run_folder("mine", false) == "checkpoints/mine/run-11");
  ::unsetenv("TORCHELASTIC_RESTART_COUNT");
  std::filesystem::remove_all("checkpoints");
  write_file(folder / "checkpoints", "");
  CHECK_THROWS_WITH(default_run_folder("mine", false),
                    ContainsSubstring("cannot make a folder in checkpoints/mine") && ContainsSubstring("--no-save"));
  std::filesystem::current_path(before);
}

TEST_CASE("another run is neither replaced nor resumed by accident", "[run_folder]") {
  const Run run(3);
  const std::string other = R"({"epochs":3,"lr":0.2,"world_size":1})";
  CHECK_THROWS_WITH(run.open(other), ContainsSubstring("already holds a run with lr 0.1 (this one: 0.2)") &&
                                         ContainsSubstring("overwrite the run") && !ContainsSubstring("--"));
  CHECK_THROWS_WITH(run.open(other, {.resume = true}),
                    ContainsSubstring("cannot resume") && ContainsSubstring("lr 0.1"));
  CHECK_THROWS_WITH(run.open(R"({"epochs":3,"lr":0.1,"world_size":1,"mode":"cnn"})"), ContainsSubstring("mode null"));
  CHECK_FALSE(run.open(other, {.overwrite = true}).to_resume);
  CHECK(read_file(run.path) == run.before);
}

TEST_CASE("an existing run is resumed", "[run_folder]") {
  for (const std::int64_t epoch : {2, 3}) {
    for (const bool resume : {false, true}) {
      const RunFolder resumed = Run(epoch).open(kConfig, {.resume = resume});
      REQUIRE(resumed.to_resume);
      CHECK(resumed.to_resume->epoch == epoch);
      CHECK(resumed.to_resume->step == 10 * epoch);
    }
  }
  CHECK_FALSE(Run(2).open(kConfig, {.overwrite = true}).to_resume);
  // More epochs and another number of ranks are still the same run.
  CHECK(Run(2).open(R"({"epochs":5,"lr":0.1,"world_size":2})").to_resume);
}

TEST_CASE("a file that is no checkpoint stays as it is", "[run_folder]") {
  const Folder folder;
  write_file(folder / "checkpoint.pt", "precious");
  const auto group = ddpkit::init_process_group();
  CHECK_THROWS_WITH(open_run_folder(folder.path(), kConfig, {}, group), ContainsSubstring("is not a checkpoint") &&
                                                                            ContainsSubstring("overwrite it") &&
                                                                            !ContainsSubstring("--"));
  CHECK_THROWS_AS(open_run_folder(folder.path(), kConfig, {.resume = true}, group), ddpkit::InvalidArgument);
  CHECK(read_file(folder / "checkpoint.pt") == "precious");
}

TEST_CASE("a folder that cannot be made is an error before the training", "[run_folder]") {
  const Folder folder;
  write_file(folder / "file", "x");
  const auto group = ddpkit::init_process_group();
  CHECK_THROWS_WITH(open_run_folder(folder / "file/run", kConfig, {}, group),
                    ContainsSubstring("cannot make the folder"));
  CHECK_THROWS_AS(open_run_folder("/proc/none", kConfig, {}, group), ddpkit::Error);
}

RANK_TEST("all ranks learn what rank 0 found in the folder", "[run_folder]", 2) {
  const Run run(2);  // Each rank has a separate folder; only rank 0's is used.
  const RunFolder found = open_run_folder(group.rank() == 0 ? run.folder.path() : std::filesystem::path("/proc/none"),
                                          kConfig, {.resume = true}, group);
  REQUIRE(found.to_resume);
  CHECK(found.to_resume->epoch == 2);
  CHECK(found.to_resume->config == kConfig);
  const Run other(2);
  try {
    open_run_folder(other.folder.path(), R"({"epochs":3,"lr":0.3,"world_size":1})", {}, group);
    FAIL("no error");
  } catch (const ddpkit::InvalidArgument& error) {
    CHECK(error.context().rank == 0);
    CHECK_THAT(error.what(), ContainsSubstring("a run with lr 0.1"));
  }
}

TEST_CASE("a folder into which another one trains is refused until that one ends", "[run_folder]") {
  const Run run(2);
  std::optional<RunFolder> first = run.open(kConfig);
  // The file that is being written stays unchanged too.
  AtomicFile writing(run.path);
  writing.write("new", 3);
  CHECK_THROWS_WITH(run.open(kConfig, {.overwrite = true}),
                    ContainsSubstring("another process trains into " + run.folder.path().string()) &&
                        ContainsSubstring("use another folder") && !ContainsSubstring("--"));
  CHECK(read_file(run.path) == run.before);
  writing.commit();
  CHECK(read_file(run.path) == "new");
  write_file(run.path, run.before);
  RunFolder copy = *first;
  first.reset();
  CHECK_THROWS_WITH(run.open(kConfig), ContainsSubstring("another process trains into"));
  copy = RunFolder();
  CHECK(run.open(kConfig).to_resume);
}

TEST_CASE("a folder whose run is just ending is waited for", "[run_folder]") {
  const Run run(2);
  std::optional<RunFolder> first = run.open(kConfig);
  std::thread ending([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    first.reset();
  });
  std::optional<RunFolder> second;
  CHECK_NOTHROW(second = run.open(kConfig));
  ending.join();
  REQUIRE(second);
  CHECK(second->to_resume);
}

TEST_CASE("a run that a launcher restarts overwrites only files from before the job", "[run_folder]") {
  const std::string other = R"({"epochs":3,"lr":0.2,"world_size":1})";
  const Run run(3);
  for (const int restart : {0, 1, 2}) {  // No attempt has reached a checkpoint.
    const Attempt attempt(restart);
    CHECK_FALSE(run.open(other, {.overwrite = true}).to_resume);
    CHECK(read_file(run.path) == run.before);
  }
  std::filesystem::last_write_time(run.path, std::filesystem::file_time_type::clock::now() + std::chrono::seconds(1));
  for (const int restart : {3, 4}) {
    const Attempt attempt(restart);
    CHECK(run.open(kConfig, {.overwrite = true}).to_resume);
    CHECK_THROWS_WITH(run.open(other, {.overwrite = true}), ContainsSubstring("already holds a run with lr 0.1"));
  }
  {
    const Attempt attempt(1, "another");  // Whose first one has not come as far as the folder.
    CHECK_FALSE(run.open(kConfig, {.overwrite = true}).to_resume);
  }
  CHECK_FALSE(run.open(other, {.overwrite = true}).to_resume);  // Without a launcher.
  CHECK(names_in(run.folder.path()) == std::vector<std::string>{"checkpoint.pt"});
}

TEST_CASE("a run whose checkpoint is missing is known by its numbered ones", "[run_folder]") {
  const std::string other = R"({"epochs":3,"lr":0.2,"world_size":1})";
  const Run run(3);
  std::filesystem::rename(run.path, run.folder / "checkpoint-30.pt");
  write_file(run.folder / "checkpoint-40.pt", "damaged");
  CHECK_THROWS_WITH(run.open(other), ContainsSubstring("already holds a run with lr 0.1 (this one: 0.2)"));
  CHECK_FALSE(std::filesystem::exists(run.path));
  CHECK_FALSE(run.open(other, {.overwrite = true}).to_resume);
  const RunFolder found = run.open(kConfig, {.resume = true});
  REQUIRE(found.to_resume);
  CHECK(found.to_resume->step == 30);
  CHECK(read_file(run.path) == run.before);
  CHECK(read_file(run.folder / "checkpoint-30.pt") == run.before);
}
