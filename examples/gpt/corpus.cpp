#include "gpt/corpus.h"

#include <torch/types.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/error.h>

namespace gpt {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> files_of(const fs::path& path) {
  std::error_code error;
  if (!fs::exists(path, error)) throw ddpkit::InvalidArgument(fmt::format("there is no text {}", path.string()));
  if (!fs::is_directory(path, error)) return {path};
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(path, error))
    if (entry.is_regular_file() && !entry.is_symlink()) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

std::string read(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(stream), {}};
  if (!stream) throw ddpkit::InvalidArgument(fmt::format("cannot read {}", file.string()));
  return text;
}

}  // namespace

at::Tensor Corpus::encode(const std::string& text) const {
  std::vector<std::int64_t> numbers;
  for (const char character : text) {
    const auto found = std::lower_bound(vocabulary.begin(), vocabulary.end(), character);
    if (found != vocabulary.end() && *found == character) numbers.push_back(found - vocabulary.begin());
  }
  return torch::tensor(numbers, torch::kLong);
}

Corpus read_corpus(const std::string& path, std::int64_t context) {
  std::string text;
  for (const fs::path& file : files_of(path)) text += read(file);
  if (static_cast<std::int64_t>(text.size()) < 10 * context)
    throw ddpkit::InvalidArgument(
        fmt::format("{} has {} characters; --context {} needs {} or more", path, text.size(), context, 10 * context));
  Corpus corpus{.name = fs::path(path).filename().string(), .vocabulary = {}, .train = {}, .validation = {}};
  const std::set<char> characters(text.begin(), text.end());
  corpus.vocabulary.assign(characters.begin(), characters.end());
  const at::Tensor numbers = corpus.encode(text);
  const std::int64_t trained = numbers.numel() / 10 * 9;
  corpus.train = numbers.narrow(0, 0, trained);
  corpus.validation = numbers.narrow(0, trained, numbers.numel() - trained);
  return corpus;
}

}  // namespace gpt
