#include <ddpkit/train/text.h>

#include "asr_program.h"

using namespace asr::testing;

namespace {

std::vector<double> losses_of(const Run& run) {
  std::vector<double> losses;
  for (const std::string& line : run.lines) {
    if (!line.starts_with("{\"step\"")) continue;
    losses.push_back(nlohmann::json::parse(line)["loss"]);
  }
  return losses;
}

}  // namespace

TEST_CASE("asr learns synthetic speech on two ranks and transcribes it", "[asr]") {
  const Folder folder;
  const std::string run_folder = (folder / "run").string();
  const Run run = run_asr(2, joined(small(), {"--json", "--save-dir", run_folder, "data.dev=" + corpus(),
                                              "training.epochs=30", "evaluation.every_epochs=30"}));
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  REQUIRE(run.lines.size() == 31);
  const auto first = nlohmann::json::parse(run.lines.front()), last = nlohmann::json::parse(run.lines[29]);
  CHECK(first["epoch"] == 1);
  CHECK(first["step"] == 6);  // 46 utterances in batches of 8.
  CHECK_FALSE(first.contains("dev_cer"));
  CHECK(last["train_loss"].get<double>() < 0.5 * first["train_loss"].get<double>());
  CHECK(last["dev_utterances"] == 46);  // No utterance is dropped or repeated.
  CHECK(last["dev_cer"].get<double>() < 0.1);
  CHECK(last["world_size"] == 2);
  CHECK(last["wait_seconds"] >= 0);
  CHECK(run.lines.back() == "no file skipped");

  const std::string wav = (std::filesystem::path(corpus()).parent_path() / "12.wav").string();
  const Run transcribed = run_asr(0, {"transcribe", wav, "--save-dir", run_folder});
  INFO(transcribed.errors);
  REQUIRE(transcribed.exit_code == 0);
  REQUIRE(transcribed.lines.size() == 1);
  const Run streamed = run_asr(0, {"transcribe", wav, "--streaming", "--save-dir", run_folder});
  REQUIRE(streamed.lines.size() == 1);
  const auto apart = [](const std::string& a, const std::string& b) { return ddpkit::train::edit_distance(a, b); };
  CHECK(transcribed.lines[0].size() >= 4);
  CHECK(apart(transcribed.lines[0], streamed.lines[0]) <= 2);

  for (const int ranks : {1, 3}) {
    const Run evaluated = run_asr(ranks, {"evaluate", "--json", "--save-dir", run_folder});
    INFO(evaluated.errors);
    REQUIRE(evaluated.exit_code == 0);
    const auto line = nlohmann::json::parse(evaluated.lines.front());
    CHECK(line["utterances"] == 46);
    CHECK(line["cer"].get<double>() == Approx(last["dev_cer"].get<double>()));
    CHECK(line["wer"].get<double>() == Approx(last["dev_wer"].get<double>()));
  }
  const Run beam = run_asr(1, {"evaluate", "--json", "--save-dir", run_folder, "evaluation.decoder=beam"});
  CHECK(nlohmann::json::parse(beam.lines.front())["cer"].get<double>() < 0.12);
}

TEST_CASE("one, two and three ranks have the same loss in 50 steps, dropout and SpecAugment included", "[asr]") {
  const Arguments arguments = joined(small(), {"--json", "--max-steps", "50", "run.log_steps=1", "training.epochs=20",
                                               "training.amp=false", "training.lr=2e-3"});
  const std::vector<double> alone = losses_of(run_asr(1, arguments));
  REQUIRE(alone.size() == 50);
  CHECK(alone.back() < alone.front());
  for (const int ranks : {2, 3}) {
    const std::vector<double> together = losses_of(run_asr(ranks, arguments));
    REQUIRE(together.size() == 50);
    for (std::size_t step = 0; step < 50; ++step) {
      CAPTURE(ranks, step);
      CHECK(std::abs(together[step] - alone[step]) < 1e-4);
    }
  }
}

TEST_CASE("a launcher and --spawn give the same weights, and a stopped run resumes", "[asr]") {
  const Folder launched, spawned, stopped;
  const Arguments arguments = joined(small(), {"training.epochs=3"});
  REQUIRE(run_asr(2, joined(arguments, {"--save-dir", launched.path()})).exit_code == 0);
  const Run run = run_asr(0, joined(arguments, {"--spawn", "2", "--save-dir", spawned.path()}));
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  CHECK(same_bits(weights_of(launched.path()), weights_of(spawned.path())));
  // Stops in the middle of the first epoch and of the second.
  const Arguments pieces = joined(arguments, {"training.checkpoint_steps=1", "--save-dir", stopped.path()});
  for (const char* steps : {"4", "9"}) REQUIRE(run_asr(2, joined(pieces, {"--max-steps", steps})).exit_code == 0);
  const Run resumed = run_asr(2, pieces);
  INFO(resumed.errors);
  REQUIRE(resumed.exit_code == 0);
  CHECK(same_bits(weights_of(launched.path()), weights_of(stopped.path())));
}

TEST_CASE("an asr run killed within an epoch resumes within it, to the same bits", "[asr][.long]") {
  const Folder whole, killed;
  const auto arguments = [&](const Folder& folder) {
    return joined(small(), {"--json", "training.epochs=5", "training.checkpoint_steps=1", "--save-dir", folder.path()});
  };
  const Run undisturbed = run_asr(2, arguments(whole));
  REQUIRE(undisturbed.exit_code == 0);
  const std::int64_t steps = ddpkit::train::read_checkpoint_info(whole / "checkpoint.pt").step / 5;
  bool was_within = false;
  const auto runs = run_until_not_killed(
      2, undisturbed, [&](const Kill& kill) { return run_asr(2, arguments(killed), kill); },
      [&] { was_within = was_within || is_within_epoch(killed / "checkpoint.pt", steps); }, killed / "checkpoint.pt");
  CHECK(runs.kills > 0);
  CHECK(was_within);
  CHECK(same_bits(weights_of(whole.path()), weights_of(killed.path())));
  // If the last kill came after the last checkpoint, no epoch remained to report.
  if (runs.last.lines.size() > 1)
    CHECK(runs.last.json(runs.last.lines.size() - 2)["train_loss"] == undisturbed.json(4)["train_loss"]);
}

// The reference: a checkpoint of 3 ranks from the beginning of the lost update, resumed on 2 ranks.
TEST_CASE("asr --elastic continues without a lost rank with the weights of a resumed run", "[asr]") {
  const Folder continued, resumed;
  const auto arguments = [](const Folder& folder) {
    return joined(small(), {"training.epochs=4", "training.checkpoint_steps=1", "--save-dir", folder.path()});
  };
  const std::string kill_rank_1 = fmt::format(
      "[ $RANK = 1 ] && (until [ -e '{}' ]; do sleep 0.002; kill -0 $$ || exit; done; kill -9 $$) & exec \"$@\"",
      (continued / "checkpoint.pt").string());
  const Run run = ddpkit::testing::run_program(
      DDPKIT_TEST_DDPKIT, 0,
      joined({"run", "-n", "3", "--min-ranks", "2", "--", "sh", "-c", kill_rank_1, "sh", DDPKIT_TEST_ASR, "--elastic"},
             arguments(continued)));
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  const std::string words = "; 2 ranks continue from step ";
  const auto at = run.errors.find(words);
  REQUIRE(at != std::string::npos);
  const std::string step = std::to_string(std::stoi(run.errors.substr(at + words.size())));
  REQUIRE(run_asr(3, joined(arguments(resumed), {"--max-steps", step})).exit_code == 0);
  REQUIRE(std::to_string(ddpkit::train::read_checkpoint_info(resumed / "checkpoint.pt").step) == step);
  REQUIRE(run_asr(2, arguments(resumed)).exit_code == 0);
  // The statistics of the features, which are buffers, lack those of the lost rank, or of all ranks before the resume.
  const auto parameters = [](const Folder& folder) { return asr::load_model(folder.path()).model->parameters(); };
  CHECK(same_bits(parameters(continued), parameters(resumed)));
}

TEST_CASE("asr check passes on one process and on several", "[asr]") {
  for (const Arguments& arguments : {Arguments{"check"}, Arguments{"check", "--spawn", "3"}}) {
    const Run run = run_asr(0, arguments);
    INFO(run.errors);
    CHECK(run.exit_code == 0);
    REQUIRE_FALSE(run.lines.empty());
    CHECK_THAT(run.lines.back(), ContainsSubstring("the distributed set-up works"));
  }
  const Run run = run_asr(2, {"check"});
  CHECK(std::count_if(run.lines.begin(), run.lines.end(), [](const auto& x) { return x.starts_with("ok  "); }) == 5);
}

TEST_CASE("asr --spawn accepts torchrun's names for a number of ranks", "[asr]") {
  const Run run = run_asr(0, {"check", "--spawn", "some"});
  CHECK(run.exit_code == 2);
  CHECK_THAT(run.errors, ContainsSubstring("--spawn must be a number from 1 to 4096, gpu, cpu or auto, not 'some'"));
  // No GPU is visible: one rank per core.
  const Folder folder;
  const std::string out = folder / "out";
  REQUIRE(std::system(("CUDA_VISIBLE_DEVICES= taskset -c 0 " DDPKIT_TEST_ASR " check --spawn auto > " + out).c_str()) ==
          0);
  CHECK_THAT(read_file(out), ContainsSubstring("the distributed set-up works"));
}

TEST_CASE("two hosts that each spawn a rank connect", "[asr][gloo]") {
  const std::string host = " check --spawn 1 --nnodes 2 --master-addr localhost --master-port 29871 --node-rank ";
  const Folder folder;
  const std::string script = "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT; cd " +
                             folder.path().string() + "; " DDPKIT_TEST_ASR + host + "1 > one 2>&1 & " DDPKIT_TEST_ASR +
                             host + "0 > zero 2>&1; wait";
  REQUIRE(std::system(("cd " + folder.path().string() + "; " + script).c_str()) == 0);
  const std::string output = read_file(folder / "zero");
  INFO(output << read_file(folder / "one"));
  if (output.find("gloo") != std::string::npos && output.find("ok  ") == std::string::npos)
    DDPKIT_SKIP("this build has no gloo, which several hosts need");
  CHECK_THAT(output,
             ContainsSubstring("rank 1 of 2") && ContainsSubstring("the distributed set-up works: 2 ranks, gloo"));
}

TEST_CASE("batch norm over all ranks trains", "[asr]") {
  const Run run = run_asr(
      2, joined(small(), {"--json", "training.epochs=3", "model.batch_norm=true", "distributed.sync_batchnorm=true",
                          "distributed.find_unused_parameters=true", "data.dev=" + corpus()}));
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  const auto first = nlohmann::json::parse(run.lines.front()), last = nlohmann::json::parse(run.lines[2]);
  CHECK(last["train_loss"].get<double>() < first["train_loss"].get<double>());
  CHECK(last["dev_utterances"] == 46);
}

TEST_CASE("the full model has 7.16 M parameters, and prints the number", "[asr]") {
  const Run run = run_asr(1, {"--config", DDPKIT_TEST_CONFIGS "/base_config.yaml", "data.train=" + corpus(),
                              "data.dev=", "--max-steps", "1", "--no-save"});
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  const std::string start = "LMU: ";
  const auto line =
      std::find_if(run.lines.begin(), run.lines.end(), [&](const auto& text) { return text.starts_with(start); });
  REQUIRE(line != run.lines.end());
  CHECK(std::stod(line->substr(start.size())) == Approx(7.16).epsilon(0.01));
  CHECK_THAT(*line, ContainsSubstring("M parameters (28.7 MB), adamw, lr 0.001, "));
}

TEST_CASE("asr names invalid options", "[asr]") {
  const auto refused = [](const Arguments& arguments, const std::string& message,
                          const std::vector<int>& worlds = {1}) {
    ddpkit::testing::check_program_refuses(DDPKIT_TEST_ASR, arguments, 2, message, worlds);
  };
  refused(joined(small(), {"training.lrr=1"}), "unknown option 'training.lrr'; did you mean training.lr?");
  refused(joined(small(), {"training.lr=no"}), "training.lr must be a number");
  refused(joined(small(), {"distributed.backend=mpi"}),
          "distributed.backend must be one of auto, shm, gloo, nccl, hierarchical, not ");
  refused({"--config", "/nowhere.yaml"}, "there is no config file /nowhere.yaml");
  refused({}, "data.train is not given", {1, 2});
  refused({"trian"}, "unexpected argument 'trian'; the commands are train, evaluate, check, transcribe");
}
