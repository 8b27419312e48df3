// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace asr {

/// A recording and what is said in it.
struct Utterance {
  std::filesystem::path file;
  std::string text;         ///< normalise()d.
  std::string name;         ///< As the corpus calls it: its path within the corpus, or LibriSpeech's "84-121123-0001".
  std::int64_t frames = 0;  ///< Of features; 0 until its header has been looked at.
};

/// A JSON-lines manifest (one object a line: audio_filepath, duration, text; paths are relative to the manifest), or a
/// folder in LibriSpeech's layout (CHAPTER.trans.txt beside the FLAC or WAV files it names), which is searched all the
/// way down and sorted by name. Files are not looked at. Throws InvalidArgument with FILE:LINE for what is neither.
std::vector<Utterance> read_corpus(const std::filesystem::path& path);

/// Those whose name begins with one of `prefixes`; all of them where there is none.
std::vector<Utterance> including(std::vector<Utterance> utterances, const std::vector<std::string>& prefixes);

}  // namespace asr
