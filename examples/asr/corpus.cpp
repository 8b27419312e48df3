#include "asr/corpus.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/train/text.h>

#include "asr/alphabet.h"
#include "data_files.h"

namespace asr {
namespace {

using ddpkit::InvalidArgument;
using ddpkit::train::in_quotes;
namespace fs = std::filesystem;

constexpr double kLongest = 1e8;  // Seconds.

// Seconds; returns `otherwise` if the manifest has no value.
double seconds_in(const nlohmann::json& json, const char* key, double otherwise, const std::string& here) {
  if (!json.contains(key) || json[key].is_null()) return otherwise;
  const double value = json[key].is_number() ? json[key].get<double>() : -1;
  if (!(value >= 0) || value > kLongest)
    throw InvalidArgument(
        fmt::format("{}: \"{}\" is {}: it must be seconds, 0 or more", here, key,
                    in_quotes(json[key].dump(-1, ' ', false, nlohmann::json::error_handler_t::replace))));
  return value;
}

std::vector<Utterance> read_manifest(const fs::path& path) {
  std::vector<Utterance> utterances;
  std::istringstream file(data_files::read_text(path));
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    const std::string here = fmt::format("{}:{}", path.string(), ++number);
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) throw InvalidArgument(fmt::format("{}: no JSON object", here));
    for (const char* key : {"audio_filepath", "text"}) {
      if (!json.contains(key) || !json[key].is_string())
        throw InvalidArgument(fmt::format("{}: \"{}\" must exist and be a string", here, key));
    }
    if (json.contains("channel_selector"))
      throw InvalidArgument(fmt::format("{}: \"channel_selector\" is not supported: the channels are averaged", here));
    const std::string name = json["audio_filepath"];
    if (name.find('\0') != std::string::npos)
      throw InvalidArgument(
          fmt::format("{}: \"audio_filepath\" is {}: no file has such a name", here, in_quotes(name)));
    utterances.push_back({.file = path.parent_path() / name,
                          .text = normalise(json["text"]),
                          .name = name,
                          .segment = {.offset = seconds_in(json, "offset", 0, here),
                                      .duration = seconds_in(json, "duration", 0, here)}});
  }
  return utterances;
}

bool is_recording(const fs::path& path) {
  const std::string ending = data_files::lower(path.extension().string());
  return ending == ".flac" || ending == ".wav";
}

// Reads a folder in LibriSpeech's layout and all its subfolders, through links.
class LibriSpeech {
 public:
  explicit LibriSpeech(const fs::path& root) { read_folder(root); }

  std::vector<Utterance> utterances;

 private:
  void read_folder(const fs::path& folder) {
    if (!seen_.insert(fs::canonical(folder)).second) return;  // Links may form a cycle.
    std::map<std::string, fs::path> recordings;               // [name in lower case]
    std::vector<fs::path> transcripts;
    for (const fs::path& path : data_files::entries(folder)) {
      if (fs::is_directory(path)) {
        read_folder(path);
      } else if (!fs::exists(path)) {
        throw InvalidArgument(fmt::format("{} is a link to nothing", path.string()));
      } else if (!data_files::without_ending(path.filename().string(), ".trans.txt").empty()) {
        transcripts.push_back(path);
      } else if (is_recording(path) && !recordings.emplace(data_files::lower(path.filename().string()), path).second) {
        throw InvalidArgument(
            fmt::format("{} has the same name as another file except for upper and lower case", path.string()));
      }
    }
    std::string lost;  // A name without a recording. If a recording has no name either, one of them is misspelt.
    for (const fs::path& path : transcripts) read_transcripts(path, recordings, lost);
    if (!recordings.empty())
      throw InvalidArgument(fmt::format("{}: no line of a *.trans.txt in its folder names it{}",
                                        recordings.begin()->second.string(),
                                        lost.empty() ? "" : fmt::format(", and {} has no recording", lost)));
  }

  // Removes the recordings that the transcripts name from `recordings`.
  void read_transcripts(const fs::path& path, std::map<std::string, fs::path>& recordings, std::string& lost) {
    std::istringstream file(data_files::read_text(path));
    int number = 0;
    for (std::string line; std::getline(file, line);) {
      const std::string here = fmt::format("{}:{}", path.string(), ++number);
      if (!line.empty() && line.back() == '\r') line.pop_back();
      if (line.empty()) continue;
      const std::string name = line.substr(0, line.find(' '));
      if (name.empty() || name.find('/') != std::string::npos || name.find('\0') != std::string::npos)
        throw InvalidArgument(fmt::format("{}: not a LibriSpeech line NAME TEXT", here));
      fs::path recording = path.parent_path() / (name + ".flac");
      int found = 0;
      for (const char* ending : {".flac", ".wav"}) {
        const auto place = recordings.find(data_files::lower(name + ending));
        if (place == recordings.end()) continue;
        recording = place->second;
        recordings.erase(place);
        if (++found > 1)
          throw InvalidArgument(fmt::format("{}: {} exists as .flac and as .wav: remove one", here, name));
      }
      if (found == 0) lost = name;
      utterances.push_back({.file = recording, .text = normalise(line.substr(name.size())), .name = name});
    }
  }

  std::set<fs::path> seen_;
};

std::vector<Utterance> read_librispeech(const fs::path& folder) {
  std::vector<Utterance> utterances = LibriSpeech(folder).utterances;
  if (utterances.empty())
    throw InvalidArgument(fmt::format("{}: no *.trans.txt below it: not in LibriSpeech's layout", folder.string()));
  std::sort(utterances.begin(), utterances.end(),
            [](const Utterance& a, const Utterance& b) { return a.name < b.name; });
  return utterances;
}

}  // namespace

std::string Utterance::where() const {
  if (segment.is_whole()) return file.string();
  return fmt::format("{} from {} s on, {}", file.string(), segment.offset,
                     segment.duration > 0 ? fmt::format("{} s", segment.duration) : "to its end");
}

std::vector<Utterance> read_corpus(const fs::path& path) {
  if (!fs::exists(path)) throw InvalidArgument(fmt::format("there is no manifest or folder {}", path.string()));
  return fs::is_directory(path) ? read_librispeech(path) : read_manifest(path);
}

std::vector<Utterance> including(std::vector<Utterance> utterances, const std::vector<std::string>& prefixes) {
  if (prefixes.empty()) return utterances;
  std::erase_if(utterances, [&](const Utterance& utterance) {
    return std::none_of(prefixes.begin(), prefixes.end(),
                        [&](const std::string& prefix) { return utterance.name.starts_with(prefix); });
  });
  return utterances;
}

}  // namespace asr
