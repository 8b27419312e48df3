#include "video_program.h"

using namespace video::testing;

TEST_CASE("video trains on one rank and several, and counts each validation clip once", "[video]") {
  for (const int ranks : {1, 2, 3}) {
    CAPTURE(ranks);
    const Folder folder;
    const Run run = run_video(ranks, joined(quick(), {"--epochs", "2", "--num-workers", ranks == 2 ? "2" : "0",
                                                      "--save-dir", folder.path()}));
    INFO(run.errors);
    REQUIRE(run.exit_code == 0);
    CHECK(run.errors.empty());
    REQUIRE(run.lines.size() == 3);
    const auto first = run.json(0), second = run.json(1);
    CHECK(first["world_size"] == ranks);
    CHECK(second["epoch"] == 2);
    std::int64_t clips = 0;
    for (const auto& row : second["validation_confusion"]) {
      for (const std::int64_t count : row) clips += count;
    }
    CHECK(clips == second["validation_clips"]);
    CHECK(clips == 10);  // One of six videos, of ten trials each.
    CHECK(std::isfinite(second["train_loss"].get<double>()));
    CHECK_THAT(run.lines.back(), ContainsSubstring("best macro F1 "));
    const std::string best = fmt::format("best_model_epoch{}.pt", second["best"].get<bool>() ? 1 : 0);
    CHECK(names_in(folder.path()) == std::vector<std::string>{"best.pt", best, "checkpoint.pt", "config.yaml",
                                                              "confusion.svg", "curves.svg", "logs", "metrics.csv"});
    CHECK(read_file(folder / best) == read_file(folder / "best.pt"));
    CHECK(ddpkit::train::read_checkpoint_info(folder / "checkpoint.pt").epoch == 2);
  }
}

TEST_CASE("video prints classes, weights and epochs for a reader, and a config file starts the same run", "[video]") {
  const Folder folder;
  Arguments arguments = quick();
  arguments.pop_back();
  const Run run = run_video(
      2, joined({"train"}, joined(arguments, {"--epochs", "1", "--balance", "sampler", "--lr-scaling", "linear", "--lr",
                                              "0.001", "--sync-batch-norm", "--save-dir", folder.path()})));
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  std::string text;
  for (const std::string& line : run.lines) text += line + "\n";
  CHECK_THAT(text, ContainsSubstring("Found 6 unique videos with 60 total trials\nTrain trials: 50, Val trials: 10\n"));
  CHECK_THAT(text, ContainsSubstring("Class 0 (rest           ):     27 samples (54.00%) -> weight: 0.2315\n"));
  CHECK_THAT(text, ContainsSubstring("Effective batch size: 8 (4 per rank x 2 ranks)\n"));
  CHECK_THAT(text, ContainsSubstring("adamw, lr 0.002 (0.001 x 2, linear), mixed precision "));
  CHECK_THAT(text, ContainsSubstring(", backend shm, sync_batchnorm, saving to " + folder.path().string() + "\n"));
  CHECK_THAT(text, ContainsSubstring("Epoch 1/1 - Train Loss: ") && ContainsSubstring(" | Val Loss: "));
  CHECK_THAT(text, ContainsSubstring("macro F1"));
  const Folder again;
  const Run second = run_video(
      2, {"--config", folder / "config.yaml", "--save-dir", again.path(), "--check", "index", "--num-workers", "0"});
  INFO(second.errors);
  REQUIRE(second.exit_code == 0);
  CHECK(same_bits(weights_in(folder / "checkpoint.pt"), weights_in(again / "checkpoint.pt")));
}

TEST_CASE("a run does not depend on how its clips were loaded", "[video]") {
  const Folder cache;
  std::vector<std::vector<at::Tensor>> weights;
  for (const Arguments& way :
       {Arguments{"--num-workers", "0"}, Arguments{"--num-workers", "3"}, Arguments{"--cache-dir", cache.path()},
        Arguments{"--cache-dir", cache.path()}, Arguments{"--open-videos", "1"}}) {
    CAPTURE(way);
    const Folder folder;
    const Run run = run_video(2, joined(quick(generated(), weights.size() == 3 ? "decode" : "index"),
                                        joined(way, {"--epochs", "2", "--save-dir", folder.path()})));
    INFO(run.errors);
    REQUIRE(run.exit_code == 0);
    weights.push_back(weights_in(folder / "checkpoint.pt"));
    CHECK(same_bits(weights.front(), weights.back()));
  }
  CHECK(names_in(cache.path()).size() == 60);
}

TEST_CASE("bad data is named with file and line, and stops the run or is skipped", "[video]") {
  const Folder folder;
  const std::filesystem::path data = folder / "set";
  std::filesystem::copy(generated(), data, std::filesystem::copy_options::recursive);
  const std::string csv = read_file(data / "trials.csv");
  // Lines from 62.
  const std::string good_bytes = read_file(data / "videos/000.mp4");
  write_file(data / "videos/cut.mp4", good_bytes.substr(0, good_bytes.size() / 2));
  std::string damaged = good_bytes;
  for (std::size_t i = good_bytes.size() / 3; i < good_bytes.size() / 3 + 600; ++i) damaged[i] ^= 0x5A;
  write_file(data / "videos/damaged.mp4", damaged);
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"videos/cut.mp4,0,16,rest", "is truncated or no video"},
      {"videos/none.mp4,0,16,rest", "there is no file"},
      {"videos/000.mp4,100000,100016,rest", "but it has only"},
      {"videos/000.mp4,0,16,fly", "unknown label 'fly'"},
      {"videos/000.mp4,0,x,rest", "end_frame 'x' is no whole number"},
      {"videos/damaged.mp4,0,200,walk", "damaged.mp4: "},
  };
  for (const auto& [line, message] : bad) {
    write_file(data / "trials.csv", csv + line + "\n");
    Arguments arguments = joined(quick(data, "decode"), {"--epochs", "1"});
    check_refused(arguments, 1, (data / "trials.csv").string() + ":62: ", {2});
    check_refused(arguments, 1, message, {1});
  }
  std::string all = csv;
  for (const auto& [line, message] : bad) all += line + "\n";
  write_file(data / "trials.csv", all);
  for (const int ranks : {1, 2, 3}) {
    CAPTURE(ranks);
    const Run run = run_video(ranks, joined(quick(data, "decode"), {"--epochs", "1", "--on-bad-data", "skip"}));
    INFO(run.errors);
    REQUIRE(run.exit_code == 0);
    CHECK_THAT(run.errors, ContainsSubstring("6 bad trials skipped:"));
    for (std::size_t i = 0; i < bad.size(); ++i)
      CHECK_THAT(run.errors,
                 ContainsSubstring(fmt::format("trials.csv:{}: ", 62 + i)) && ContainsSubstring(bad[i].second));
    // Logged once, by rank 0.
    CHECK(std::count(run.errors.begin(), run.errors.end(), '\n') == 7);
  }
  for (const char* policy : {"stop", "skip"}) {
    write_file(data / "trials.csv", csv.substr(csv.find('\n') + 1));
    check_refused(joined(quick(data), {"--on-bad-data", policy}), 1, "trials.csv:1: the first line must name");
  }
}

TEST_CASE("wrong options of video are refused in one sentence", "[video]") {
  const Folder folder;
  check_refused({"--lr", "-1"}, 2, "--lr must be a number above 0", {1, 2});
  check_refused({"--data", "/nonexistent"}, 1, "there is no data folder /nonexistent", {2});
  check_refused({"--data", folder.path()}, 1, "there is no file");
  check_refused(joined(quick(), {"--size", "8"}), 2, "--size", {1});
  check_refused(joined(quick(), {"--validation-share", "nan"}), 2,
                "--validation-share must be a number from 0.01 to 0.9, not 'nan'", {1});
  check_refused(joined(quick(), {"--balance", "weights"}), 2, "--balance must be one of none, loss, sampler");
  check_refused(joined(quick(), {"--lr-scaling", "cubic"}), 2, "--lr-scaling must be one of none, linear, sqrt", {1});
  check_refused(joined(quick(), {"--frames", "18"}), 1, "frames ", {1});
  check_refused(joined(quick(), {"--batch-sise", "3"}), 2, "did you mean --batch-size?", {1});
  check_refused({"generate", generated().string()}, 1, "is not an empty folder", {1});
  check_refused({"generate", folder / "x", "--trials", "5"}, 1, "cannot generate 5 trials of 17 frames in 100 videos",
                {1});
  write_file(folder / "x.partial/mine", "x");
  check_refused({"generate", folder / "x", "--codec", "no-such"}, 1, "no encoder no-such", {1});
  CHECK(read_file(folder / "x.partial/mine") == "x");
  CHECK(names_in(folder.path()) == std::vector<std::string>{"x.partial"});
}

TEST_CASE("video takes labels and names that are no UTF-8", "[video]") {
  const Folder folder;
  const std::filesystem::path data = folder / "caf\xe9";
  std::filesystem::copy(generated(), data, std::filesystem::copy_options::recursive);
  for (const char* name : {"trials.csv", "classes.txt"}) {
    std::string text = read_file(data / name);
    for (std::size_t at = text.find("walk"); at != std::string::npos; at = text.find("walk", at)) text[at] = '\xe9';
    write_file(data / name, text);
  }
  for (const char* epochs : {"1", "2"}) {
    const Run run = run_video(2, joined(quick(data), {"--epochs", epochs, "--save-dir", folder / "run"}));
    INFO(run.errors);
    CHECK(run.exit_code == 0);
  }
  CHECK(ddpkit::train::read_checkpoint_info(folder / "run/checkpoint.pt").epoch == 2);
}
