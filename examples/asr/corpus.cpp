#include "asr/corpus.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include <fmt/format.h>

#include <ddpkit/comm/error.h>

#include "asr/alphabet.h"

namespace asr {
namespace {

using ddpkit::InvalidArgument;
namespace fs = std::filesystem;

std::ifstream open(const fs::path& path) {
  std::ifstream file(path);
  if (!file) throw InvalidArgument(fmt::format("cannot read {}", path.string()));
  return file;
}

std::vector<Utterance> read_manifest(const fs::path& path) {
  std::vector<Utterance> utterances;
  std::ifstream file = open(path);
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    const std::string here = fmt::format("{}:{}", path.string(), ++number);
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) throw InvalidArgument(fmt::format("{}: no JSON object", here));
    for (const char* key : {"audio_filepath", "text"}) {
      if (!json.contains(key) || !json[key].is_string())
        throw InvalidArgument(fmt::format("{}: \"{}\" must be there, and a text", here, key));
    }
    const std::string name = json["audio_filepath"];
    utterances.push_back({.file = path.parent_path() / name, .text = normalise(json["text"]), .name = name});
  }
  return utterances;
}

void read_transcripts(const fs::path& path, std::vector<Utterance>& utterances) {
  std::ifstream file = open(path);
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.empty()) continue;
    const std::string name = line.substr(0, line.find(' '));
    const fs::path flac = path.parent_path() / (name + ".flac");
    const fs::path wav = path.parent_path() / (name + ".wav");
    if (name.empty() || name.find('/') != std::string::npos)
      throw InvalidArgument(fmt::format("{}:{}: no line of LibriSpeech's, NAME TEXT", path.string(), number));
    utterances.push_back({.file = !fs::exists(flac) && fs::exists(wav) ? wav : flac,
                          .text = normalise(line.substr(name.size())),
                          .name = name});
  }
}

std::vector<Utterance> read_librispeech(const fs::path& folder) {
  std::vector<fs::path> transcripts;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.path().filename().string().ends_with(".trans.txt")) transcripts.push_back(entry.path());
  }
  if (transcripts.empty())
    throw InvalidArgument(fmt::format("{}: no *.trans.txt below it: not in LibriSpeech's layout", folder.string()));
  std::vector<Utterance> utterances;
  for (const fs::path& path : transcripts) read_transcripts(path, utterances);
  std::sort(utterances.begin(), utterances.end(),
            [](const Utterance& a, const Utterance& b) { return a.name < b.name; });
  return utterances;
}

}  // namespace

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
