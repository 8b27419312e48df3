// Formats with text and recordings: LibriSpeech folders, NeMo manifests, videos with their trials.
#include <fmt/format.h>

#include <array>
#include <cctype>
#include <map>

#include <ddpkit/comm/process_group.h>

#include "asr/corpus.h"
#include "asr/dataset.h"
#include "readers/formats.h"
#include "support/sound.h"
#include "unit/video_files.h"
#include "video/trials.h"

namespace ddpkit::testing {
namespace {

constexpr int kRate = 8000;

/// Returns the data that training uses: name, transcript and seconds of each utterance.
std::string corpus_text(const Path& corpus) {
  asr::Faults faults(asr::FaultPolicy::kStop);
  const asr::DatasetOptions options{.name = "corpus",
                                    .features = {.sample_rate = kRate, .window_ms = 10, .hop_ms = 10, .mels = 8},
                                    .cache_mb = 0,
                                    .output_frames = [](std::int64_t frames) { return frames; }};
  const asr::Dataset dataset(asr::read_corpus(corpus), options, faults, init_process_group({}));
  std::map<std::string, std::string> lines;
  for (std::size_t i = 0; i < dataset.size(); ++i)
    lines[fmt::format("{}#{:03d}", dataset[i].name, i)] =
        fmt::format("{} \"{}\" {:.2f} s\n", dataset[i].name, dataset[i].text,
                    static_cast<double>(dataset.features(i).size(0)) / 100);
  std::string text;
  for (const auto& [name, line] : lines) text += line;
  return text;
}

std::string upper(std::string text) {
  for (char& c : text) c = static_cast<char>(std::toupper(c));
  return text;
}

std::string drawn_words(std::mt19937& random) {
  std::string words;
  for (int count = drawn(random, 1, 4); count > 0; --count)
    words += (words.empty() ? "" : " ") + std::string(1, static_cast<char>(drawn(random, 'a', 'z'))) + "o";
  return words;
}

/// Writes SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt with transcripts in capitals, next to SPEAKER-CHAPTER-NUMBER.flac.
std::string write_librispeech(const Path& folder, std::mt19937& random) {
  std::map<std::string, std::string> expected;
  for (int speaker = 1; speaker <= 3; ++speaker) {
    const std::string chapter = fmt::format("{}-{}", speaker, 1000 + speaker);
    const Path place = folder / std::to_string(speaker) / std::to_string(1000 + speaker);
    std::string transcripts;
    for (int number = 0, count = drawn(random, 1, 3); number < count; ++number) {
      const std::string name = fmt::format("{}-{:04d}", chapter, number), words = drawn_words(random);
      const int hundredths = drawn(random, 20, 60);
      transcripts += name + " " + upper(words) + "\n";
      write_sound(place / (name + ".flac"), tone(300, hundredths / 100.0 + 1e-9, kRate), kRate,
                  SF_FORMAT_FLAC | SF_FORMAT_PCM_16);
      expected[name] = fmt::format("{} \"{}\" {:.2f} s\n", name, words, hundredths / 100.0);
    }
    write_file(place / (chapter + ".trans.txt"), transcripts);
  }
  std::string text;
  for (const auto& [name, line] : expected) text += line;
  return text;
}

/// Writes NeMo's manifest: audio_filepath, text, and the part of the recording that starts at `offset` and takes
/// `duration` seconds.
std::string write_manifest(const Path& folder, std::mt19937& random) {
  std::string manifest, expected;
  for (int number = 0, count = drawn(random, 2, 4); number < count; ++number) {
    const std::string name = fmt::format("sound/{}.wav", number), words = drawn_words(random);
    const int hundredths = drawn(random, 20, 60);
    write_sound(folder / name, tone(300, hundredths / 100.0 + 1e-9, kRate), kRate);
    manifest +=
        fmt::format(R"({{"audio_filepath": "{}", "duration": {:.2f}, "offset": 0.0, "text": "{}", "speaker": 1}})"
                    "\n",
                    name, hundredths / 100.0, words);
    expected += fmt::format("{} \"{}\" {:.2f} s\n", name, words, hundredths / 100.0);
  }
  write_file(folder / "manifest.json", manifest);
  return expected;
}

/// Writes trials.csv, classes.txt and the videos.
std::string write_videos(const Path& folder, std::mt19937& random) {
  write_file(folder / "classes.txt", "rest\nwalk\npaw_withdraw\n");
  std::string csv = "video,start_frame,end_frame,label,note\n", expected = "rest walk paw_withdraw\n";
  for (int number = 0; number < 2; ++number) {
    const std::string name = fmt::format("videos/{}.mp4", number);
    const int frames = drawn(random, 20, 30), first = drawn(random, 0, 3), label = drawn(random, 0, 2);
    std::filesystem::create_directories(folder / "videos");
    video::testing::write_numbered(folder / name, frames, {.size = {32, 32}});
    const std::string label_name = std::array{"rest", "walk", "paw_withdraw"}[static_cast<std::size_t>(label)];
    csv += fmt::format("{},{},{},{},\"a, b\"\n", name, first, first + 16, label_name);
    expected += fmt::format("{} of {} frames: {} to {} is {}\n", name, frames, first, first + 16, label);
  }
  write_file(folder / "trials.csv", csv);
  return expected;
}

std::string read_videos(const Path& folder) {
  video::DataFaults faults(video::trials_file(folder), video::OnBadData::kStop);
  const video::TrialSet set = video::read_trials(folder, {}, 17, faults);
  std::string text;
  for (const std::string& name : set.class_names) text += (text.empty() ? "" : " ") + name;
  text += "\n";
  for (const video::Trial& trial : set.trials)
    text += fmt::format("{} of {} frames: {} to {} is {}\n", trial.video,
                        video::index_video(folder / trial.video)->frames(), trial.first, trial.last, trial.label);
  return text;
}

}  // namespace

Format librispeech_format() {
  const std::string file = "1/1001/1-1001.trans.txt";
  return {.name = "LibriSpeech",
          .write = write_librispeech,
          .read = corpus_text,
          .text_files = {".trans.txt"},
          .edits = {{"1-1001-0099", file, "1-1001-0000", "1-1001-0099"}, {"text", file, "O", "OO"}}};
}

Format manifest_format() {
  const std::string file = "manifest.json";
  return {.name = "manifest",
          .write = write_manifest,
          .read = [](const Path& folder) { return corpus_text(folder / "manifest.json"); },
          .text_files = {".json"},
          .edits = {{"sound/00.wav", file, "sound/0.wav", "sound/00.wav"},
                    {"audio_filepath", file, "audio_filepath", "Audio_Filepath"},
                    {"text", file, "\"text\": \"", "\"text\": \"ab "},
                    {"text", file, "\"text\"", "\"Text\""},
                    {"duration", file, "\"duration\": 0.", "\"duration\": 0.1"},
                    {"duration", file, "\"duration\": ", "\"duration\": -"},
                    {"offset", file, "\"offset\": 0.0", "\"offset\": 0.1"}}};
}

Format video_format() {
  const std::string file = "trials.csv";
  return {.name = "video",
          .write = write_videos,
          .read = read_videos,
          .text_files = {".csv", "classes.txt"},
          .edits = {{"video", file, "videos/0.mp4", "videos/1.mp4"},
                    {"video", file, "video,", "Video,"},
                    {"no frames", file, "start_frame,end_frame", "end_frame,start_frame"},
                    {"end_frame", file, "end_frame", "last_frame"},
                    {"label", file, "label", "Label"},
                    {"class", "classes.txt", "rest\nwalk", "walk\nrest"},
                    {"classes", "classes.txt", "rest", "Rest"}}};
}

}  // namespace ddpkit::testing
