#include <fmt/format.h>
#include <torch/torch.h>

#include <limits>
#include <numeric>

#include <ddpkit/comm/process_group.h>

#include "asr/audio.h"
#include "asr/corpus.h"
#include "asr/dataset.h"
#include "support/catch.h"
#include "support/folder.h"
#include "support/sound.h"

using ddpkit::testing::Folder;
using ddpkit::testing::read_file;
using ddpkit::testing::tone;
using ddpkit::testing::write_file;
using ddpkit::testing::write_sound;

namespace {

constexpr int kFlac = SF_FORMAT_FLAC | SF_FORMAT_PCM_16;

// Returns the tone's frequency, computed from zero crossings.
double frequency_of(const std::vector<float>& samples, int rate) {
  int crossings = 0;
  for (std::size_t i = 1; i < samples.size(); ++i) crossings += samples[i - 1] < 0 && samples[i] >= 0 ? 1 : 0;
  return crossings * static_cast<double>(rate) / static_cast<double>(samples.size());
}

}  // namespace

TEST_CASE("WAV and FLAC are read alike, resampled and mixed down", "[asr]") {
  const Folder folder;
  const std::vector<float> wave = tone(440, 1.0, 16000);
  write_sound(folder / "a.wav", wave, 16000);
  write_sound(folder / "a.flac", wave, 16000, kFlac);
  const std::vector<float> wav = asr::read_audio(folder / "a.wav", 16000);
  CHECK(wav == asr::read_audio(folder / "a.flac", 16000));
  REQUIRE(wav.size() == wave.size());
  for (std::size_t i = 0; i < wave.size(); ++i) REQUIRE(std::abs(wav[i] - wave[i]) < 1e-4);
  CHECK(asr::audio_info(folder / "a.flac").seconds() == 1);
  for (const int rate : {8000, 11025, 44100}) {
    const std::vector<float> other = asr::read_audio(folder / "a.wav", rate);
    CHECK(std::abs(static_cast<int>(other.size()) - rate) <= 2);
    CHECK(frequency_of(other, rate) == Approx(440).margin(3));
  }
  std::vector<float> stereo;
  for (const float sample : wave) stereo.insert(stereo.end(), {sample, 0.0F});
  write_sound(folder / "stereo.wav", stereo, 16000, SF_FORMAT_WAV | SF_FORMAT_FLOAT, 2);
  CHECK(asr::read_audio(folder / "stereo.wav", 16000)[100] == Approx(wave[100] / 2));
}

TEST_CASE("recordings that are not whole are named", "[asr]") {
  const Folder folder;
  const auto refusal = [](const std::filesystem::path& path) -> std::string {
    try {
      asr::read_audio(path, 8000);
    } catch (const asr::AudioError& error) {
      CHECK(std::string(error.what()).starts_with(path.string()));
      return error.what();
    }
    return "nothing was wrong";
  };
  write_sound(folder / "whole.wav", tone(440, 1.0));
  const std::string wav = read_file(folder / "whole.wav");
  for (const std::size_t size : {wav.size() - 1, wav.size() / 2, std::size_t{50}}) {
    write_file(folder / "cut.wav", wav.substr(0, size));
    CHECK_THAT(refusal(folder / "cut.wav"), ContainsSubstring("truncated") || ContainsSubstring("empty"));
    CHECK_THROWS_AS(asr::audio_info(folder / "cut.wav"), asr::AudioError);
  }
  // A chunk after the sound is valid.
  write_file(folder / "more.wav", wav + "LIST\x04" + std::string(3, '\0') + "abcd");
  CHECK(asr::read_audio(folder / "more.wav", 8000).size() == 8000);
  std::vector<float> noise;
  for (int i = 0; i < 20000; ++i) noise.push_back(static_cast<float>((i * 7919) % 1000) / 1000 - 0.5F);
  write_sound(folder / "whole.flac", noise, 8000, kFlac);
  const std::string flac = read_file(folder / "whole.flac");
  write_file(folder / "cut.flac", flac.substr(0, flac.size() / 2));
  CHECK_THAT(refusal(folder / "cut.flac"), ContainsSubstring("truncated"));
  write_file(folder / "text.wav", "this text is not audio");
  CHECK_THAT(refusal(folder / "text.wav"), ContainsSubstring("no recording"));
  write_file(folder / "empty.wav", "");
  CHECK_THAT(refusal(folder / "empty.wav"), ContainsSubstring("no recording"));
  write_sound(folder / "silent.wav", {});
  CHECK_THAT(refusal(folder / "silent.wav"), ContainsSubstring("an empty recording"));
  CHECK_THAT(refusal(folder / "gone.wav"), ContainsSubstring("no such file"));
  write_sound(folder / "nan.wav", {0, std::numeric_limits<float>::quiet_NaN(), 0}, 8000,
              SF_FORMAT_WAV | SF_FORMAT_FLOAT);
  CHECK_THAT(refusal(folder / "nan.wav"), ContainsSubstring("sample 1 is nan"));
}

TEST_CASE("a manifest's lines are utterances", "[asr]") {
  const Folder folder;
  write_file(folder / "m.jsonl",
             "{\"audio_filepath\": \"digits/1.wav\", \"duration\": 0.5, \"text\": \"One.\"}\n\n"
             "{\"audio_filepath\": \"/far/a.flac\", \"text\": \"Hello, world\"}\r\n");
  const auto utterances = asr::read_corpus(folder / "m.jsonl");
  REQUIRE(utterances.size() == 2);
  CHECK(utterances[0].file == folder / "digits/1.wav");
  CHECK(utterances[0].text == "one");
  CHECK(utterances[0].name == "digits/1.wav");
  CHECK(utterances[1].file == "/far/a.flac");
  CHECK(utterances[1].text == "hello world");
  CHECK(asr::including(utterances, {"digits/", "x"}).size() == 1);
  CHECK(asr::including(utterances, {}).size() == 2);

  write_file(folder / "bad.jsonl",
             "{\"audio_filepath\": \"a\", \"text\": \"b\"}\n{\"audio_filepath\": 3, \"text\": \"b\"}\n");
  CHECK_THROWS_WITH(asr::read_corpus(folder / "bad.jsonl"), ContainsSubstring("bad.jsonl:2: \"audio_filepath\""));
  write_file(folder / "cut.jsonl", "{\"audio_filepath\": \"a\", \"te");
  CHECK_THROWS_WITH(asr::read_corpus(folder / "cut.jsonl"), ContainsSubstring("cut.jsonl:1: no JSON object"));
  CHECK_THROWS_WITH(asr::read_corpus(folder / "gone"), ContainsSubstring("there is no manifest or folder"));
}

TEST_CASE("a manifest's offset and duration select a part of the recording", "[asr]") {
  const Folder folder;
  write_sound(folder / "one.wav", tone(300, 1.0));
  write_file(folder / "m.jsonl", R"({"audio_filepath": "one.wav", "offset": 0.25, "duration": 0.5, "text": "one"})"
                                 "\n");
  asr::Faults faults(asr::FaultPolicy::kStop);
  const auto group = ddpkit::init_process_group({.environment = ddpkit::LaunchEnvironment{}});
  asr::DatasetOptions options;
  options.features.sample_rate = 8000;
  options.output_frames = [](std::int64_t frames) { return frames; };
  const asr::Dataset data(asr::read_corpus(folder / "m.jsonl"), options, faults, group);
  CHECK(data.seconds() == Approx(0.5).epsilon(0.1));
  CHECK(data.features(0).size(0) < 60);
}

TEST_CASE("LibriSpeech's folders are read, FLAC or WAV", "[asr]") {
  const Folder folder;
  write_file(folder / "84/121123/84-121123.trans.txt", "84-121123-0000 GO DO YOU HEAR\n84-121123-0001 BUT IN LESS\n");
  write_file(folder / "12/7/12-7.trans.txt", "12-7-0000 FIRST OF ALL\n");
  write_sound(folder / "84/121123/84-121123-0000.flac", tone(300, 0.2), 8000, kFlac);
  write_sound(folder / "84/121123/84-121123-0001.wav", tone(300, 0.2));
  const auto utterances = asr::read_corpus(folder.path());
  REQUIRE(utterances.size() == 3);
  CHECK(utterances[0].name == "12-7-0000");
  CHECK(utterances[0].text == "first of all");
  CHECK(utterances[1].file == folder / "84/121123/84-121123-0000.flac");
  CHECK(utterances[2].file == folder / "84/121123/84-121123-0001.wav");
  CHECK(utterances[2].text == "but in less");
  const Folder empty;
  CHECK_THROWS_WITH(asr::read_corpus(empty.path()), ContainsSubstring("no *.trans.txt below it"));
}

TEST_CASE("no recording of a LibriSpeech folder is lost", "[asr]") {
  const Folder folder;
  write_file(folder / "1/2/1-2.trans.txt", "1-2-0000 ONE\n");
  write_sound(folder / "1/2/1-2-0000.flac", tone(300, 0.2), 8000, kFlac);
  std::filesystem::create_directory_symlink(folder.path(), folder / "1/circle");
  CHECK(asr::read_corpus(folder.path()).size() == 1);
  write_sound(folder / "1/2/1-2-0001.WAV", tone(300, 0.2));
  CHECK_THROWS_WITH(asr::read_corpus(folder.path()), ContainsSubstring("1-2-0001.WAV: no line of a *.trans.txt"));
  write_file(folder / "1/2/1-2.trans.txt", "1-2-0000 ONE\n1-2-0001 TWO\n");
  CHECK(asr::read_corpus(folder.path()).at(1).file == folder / "1/2/1-2-0001.WAV");
  write_sound(folder / "1/2/1-2-0000.wav", tone(300, 0.2));
  CHECK_THROWS_WITH(asr::read_corpus(folder.path()), ContainsSubstring("1-2-0000 exists as .flac and as .wav"));
  std::filesystem::remove(folder / "1/2/1-2-0000.wav");
  std::filesystem::create_directory_symlink("nowhere", folder / "3");
  CHECK_THROWS_WITH(asr::read_corpus(folder.path()), ContainsSubstring("3 is a link to nothing"));
}

TEST_CASE("a segment that reaches beyond its recording is refused", "[asr]") {
  const Folder folder;
  write_sound(folder / "one.wav", tone(300, 1.0));
  CHECK(asr::read_audio(folder / "one.wav", 8000, {.offset = 0.25, .duration = 0.5}).size() == 4000);
  CHECK(asr::read_audio(folder / "one.wav", 8000, {.offset = 0.25}).size() == 6000);
  CHECK(asr::audio_info(folder / "one.wav", {.offset = 0.5, .duration = 0.51}).samples == 4000);
  CHECK_THROWS_WITH(asr::audio_info(folder / "one.wav", {.offset = 0.5, .duration = 0.6}),
                    ContainsSubstring("offset 0.5 s and duration 0.6 s reach beyond its 1.000 s"));
  CHECK_THROWS_AS(asr::read_audio(folder / "one.wav", 8000, {.offset = 1}), asr::AudioError);
  for (const char* part : {R"("offset": -1)", R"("duration": "1")", R"("offset": 1e300)"}) {
    write_file(folder / "bad.jsonl", fmt::format(R"({{"audio_filepath": "one.wav", "text": "a", {}}})", part));
    CHECK_THROWS_WITH(asr::read_corpus(folder / "bad.jsonl"), ContainsSubstring("bad.jsonl:1: \""));
  }
}
