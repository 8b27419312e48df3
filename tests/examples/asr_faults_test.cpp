// Faulty data: the program names the file, and skips it or stops.
#include "asr_program.h"

using namespace asr::testing;

namespace {

// Writes the good corpus and one more line; returns the manifest.
std::string with_line(const Folder& folder, const std::string& file, const std::string& text) {
  const auto good = std::filesystem::path(corpus()).parent_path();
  std::string lines;
  std::istringstream input(read_file(corpus()));
  for (std::string line; std::getline(input, line);) {
    auto json = nlohmann::json::parse(line);
    json["audio_filepath"] = (good / json["audio_filepath"].get<std::string>()).string();
    lines += json.dump() + "\n";
  }
  lines += nlohmann::json{{"audio_filepath", file}, {"text", text}}.dump() + "\n";
  write_file(folder / "all.jsonl", lines);
  return folder / "all.jsonl";
}

// Skip: the run succeeds and counts the file. Stop: the run ends with a sentence that names the file.
void check_policies(const std::string& manifest, const std::string& file, const std::string& kind,
                    const std::string& why) {
  for (const int ranks : {1, 2}) {
    CAPTURE(file, ranks);
    const Arguments arguments = joined(small(manifest), {"training.epochs=2"});
    const Run skipped = run_asr(ranks, joined(arguments, {"data.on_error=skip"}));
    INFO(skipped.errors);
    CHECK(skipped.exit_code == 0);
    CHECK(skipped.lines.back() == "1 file skipped: 1 " + kind);
    CHECK_THAT(skipped.errors, ContainsSubstring("skipped: ") && ContainsSubstring(file) && ContainsSubstring(why));
    const Run stopped = run_asr(ranks, joined(arguments, {"data.on_error=stop"}));
    INFO(stopped.errors);
    CHECK(stopped.exit_code == 1);
    CHECK_THAT(stopped.errors, ContainsSubstring("asr: ") && ContainsSubstring(file) && ContainsSubstring(why));
    CHECK(std::count(stopped.errors.begin(), stopped.errors.end(), '\n') == 1);
  }
}

}  // namespace

TEST_CASE("a truncated WAV is named, and is skipped or ends the run", "[asr]") {
  const Folder folder;
  write_sound(folder / "cut.wav", spoken("abc"));
  const std::string whole = read_file(folder / "cut.wav");
  write_file(folder / "cut.wav", whole.substr(0, whole.size() / 2));
  check_policies(with_line(folder, "cut.wav", "abc"), (folder / "cut.wav").string(), "unreadable", "truncated");
}

TEST_CASE("a recording whose truncation is found only while reading is named", "[asr]") {
  const Folder folder;
  std::vector<float> noise;
  for (int i = 0; i < 20000; ++i) noise.push_back(static_cast<float>((i * 7919) % 1000) / 1000 - 0.5F);
  write_sound(folder / "cut.flac", noise, 8000, SF_FORMAT_FLAC | SF_FORMAT_PCM_16);
  const std::string whole = read_file(folder / "cut.flac");
  write_file(folder / "cut.flac", whole.substr(0, whole.size() / 2));
  check_policies(with_line(folder, "cut.flac", "abc"), (folder / "cut.flac").string(), "unreadable", "truncated");
}

TEST_CASE("a FLAC whose header has a wrong length or no length is named", "[asr]") {
  const Folder folder;
  write_sound(folder / "sound.flac", spoken("abc"), 8000, SF_FORMAT_FLAC | SF_FORMAT_PCM_16);
  const std::string whole = read_file(folder / "sound.flac");
  // The number of samples: the last 36 of the 64 bits from byte 18.
  const auto announcing = [&](char high, char rest) {
    std::string changed = whole;
    changed[21] = static_cast<char>((changed[21] & 0xf0) | high);
    for (std::size_t i = 22; i < 26; ++i) changed[i] = rest;
    return changed;
  };
  write_file(folder / "most.flac", announcing(0x0f, '\xff'));
  check_policies(with_line(folder, "most.flac", "abc"), (folder / "most.flac").string(), "unreadable",
                 "of the 68719476735 samples that its header announces");
  write_file(folder / "streamed.flac", announcing(0, 0));
  check_policies(with_line(folder, "streamed.flac", "abc"), (folder / "streamed.flac").string(), "unreadable",
                 "its header has no length");
}

TEST_CASE("an empty transcript is named, and is skipped or ends the run", "[asr]") {
  const Folder folder;
  write_sound(folder / "mute.wav", spoken("abc"));
  check_policies(with_line(folder, "mute.wav", " ... "), (folder / "mute.wav").string(), "empty transcript", "empty");
}

TEST_CASE("a target longer than its frames is named, and is skipped or ends the run", "[asr]") {
  const Folder folder;
  write_sound(folder / "short.wav", spoken("a"));
  check_policies(with_line(folder, "short.wav", "a rather long text for so short a sound"),
                 (folder / "short.wav").string(), "target longer than its frames", "needs ");
}

TEST_CASE("a character outside the alphabet is named, and its file is skipped or ends the run", "[asr]") {
  const Folder folder;
  write_sound(folder / "odd.wav", spoken("abc"));
  check_policies(with_line(folder, "odd.wav", "press 5"), (folder / "odd.wav").string(), "unknown character",
                 "'5' in its transcript");
}

TEST_CASE("an utterance whose loss is NaN is named, and is skipped or ends the run", "[asr]") {
  const Folder folder;
  std::vector<float> loud = spoken("abcd");
  for (float& sample : loud) sample *= 1e30F;  // The samples are finite, but their power is not.
  write_sound(folder / "loud.wav", loud, 8000, SF_FORMAT_WAV | SF_FORMAT_FLOAT);
  check_policies(with_line(folder, "loud.wav", "abcd"), (folder / "loud.wav").string(), "NaN loss", "its loss became");
}

TEST_CASE("a run that diverges ends with one sentence, whatever the policy", "[asr]") {
  for (const int ranks : {1, 2}) {
    const Run run = run_asr(ranks, joined(small(), {"training.lr=1e20", "training.epochs=4", "training.warmup_epochs=0",
                                                    "data.on_error=skip"}));
    CHECK(run.exit_code == 1);
    CHECK_THAT(run.errors, ContainsSubstring("lower --lr"));
    CHECK(std::count(run.errors.begin(), run.errors.end(), '\n') == 1);
  }
}

TEST_CASE("a training set without valid files is an error", "[asr]") {
  const Folder folder;
  write_file(folder / "all.jsonl", "{\"audio_filepath\": \"gone.wav\", \"text\": \"a\"}\n");
  const Run run = run_asr(2, joined(small(folder / "all.jsonl"), {"data.on_error=skip"}));
  CHECK(run.exit_code == 1);
  CHECK_THAT(run.errors, ContainsSubstring("no utterance to use in it"));
}
