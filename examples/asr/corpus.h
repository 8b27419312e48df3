// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "asr/audio.h"

namespace asr {

/// A recording and what is said in it.
struct Utterance {
  std::filesystem::path file;
  std::string text;         ///< normalise()d.
  std::string name;         ///< As the corpus calls it: its path within the corpus, or LibriSpeech's "84-121123-0001".
  Segment segment = {};     ///< Of the recording.
  std::int64_t frames = 0;  ///< Of features; 0 until its header has been looked at.

  std::string where() const;  ///< The file, and which part of it: for messages.
};

/// NeMo's JSON-lines manifest (one object a line: audio_filepath, text, and the part of the recording in seconds,
/// offset and duration; paths are relative to the manifest; other keys are metadata), or a folder in LibriSpeech's
/// layout (CHAPTER.trans.txt beside the FLAC or WAV files it names), which is searched all the way down, through links,
/// and sorted by name. Recordings are not looked at. Throws InvalidArgument with FILE:LINE for what is neither, and for
/// a recording in such a folder without a transcript.
std::vector<Utterance> read_corpus(const std::filesystem::path& path);

/// Those whose name begins with one of `prefixes`; all of them where there is none.
std::vector<Utterance> including(std::vector<Utterance> utterances, const std::vector<std::string>& prefixes);

}  // namespace asr
