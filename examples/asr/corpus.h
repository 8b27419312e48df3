// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "asr/audio.h"

namespace asr {

/// A recording and its transcript.
struct Utterance {
  std::filesystem::path file;
  std::string text;         ///< The result of normalise().
  std::string name;         ///< The name in the corpus: the path within the corpus, or LibriSpeech's "84-121123-0001".
  Segment segment = {};     ///< The part of the recording.
  std::int64_t frames = 0;  ///< Feature frames; 0 until the header is read.

  std::string where() const;  ///< Returns the file and the part of it, for messages.
};

/// Reads one of:
/// - NeMo's JSON-lines manifest. Each line is an object with audio_filepath, text, and the part of the recording in
/// seconds (offset, duration). Paths are relative to the manifest. Other keys are metadata.
/// - A folder in LibriSpeech's layout: CHAPTER.trans.txt next to the FLAC or WAV files that it names. Subfolders are
/// searched recursively, through links. The result is sorted by name.
/// Does not open the recordings. Throws InvalidArgument with FILE:LINE for other input, and for a recording in such a
/// folder without a transcript.
std::vector<Utterance> read_corpus(const std::filesystem::path& path);

/// Returns the utterances whose name begins with one of `prefixes`; all of them if `prefixes` is empty.
std::vector<Utterance> including(std::vector<Utterance> utterances, const std::vector<std::string>& prefixes);

}  // namespace asr
