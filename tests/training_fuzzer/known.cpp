#include "known.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <stdexcept>

#include "shrink.h"

namespace ddpkit::fuzz {
namespace {

StoredCase read_one(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  const auto json = nlohmann::json::parse(file);
  StoredCase stored{.name = path.stem().string()};
  if (!json.contains("case")) {
    stored.drawn = from_json(json);
    return stored;
  }
  stored.about = json.value("about", "");
  stored.known = json.value("known", std::vector<std::string>());
  stored.drawn = from_json(json.at("case"));
  return stored;
}

/// Returns `drawn` without `feature`, with the fewest removals of the shrinker.
std::optional<Case> without(Case drawn, const std::string& feature) {
  for (int removals = 0; removals < 12; ++removals) {
    if (!features(drawn).contains(feature)) return drawn;
    const std::size_t before = count_feature(drawn, feature);
    const auto candidates = smaller(drawn);
    // From the back: keys before nodes and events, since removing a key changes least.
    const auto found = std::find_if(candidates.rbegin(), candidates.rend(),
                                    [&](const Case& one) { return count_feature(one, feature) < before; });
    if (found == candidates.rend()) return std::nullopt;
    drawn = *found;
  }
  return std::nullopt;
}

/// Returns WRONG for all differences of values.
std::string class_of(const std::string& kind) { return kind == "BITS" || kind.rfind("WRONG", 0) == 0 ? "WRONG" : kind; }

}  // namespace

bool is_known(const StoredCase& stored, const Verdict& verdict) {
  return std::any_of(stored.known.begin(), stored.known.end(),
                     [&](const std::string& kind) { return class_of(kind) == class_of(verdict.kind); });
}

std::vector<StoredCase> read_stored(const std::filesystem::path& path) {
  if (!std::filesystem::is_directory(path)) return {read_one(path)};
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(path))
    if (entry.path().extension() == ".json") files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::vector<StoredCase> stored;
  for (const auto& file : files) stored.push_back(read_one(file));
  return stored;
}

std::string explain(const Case& drawn, const Verdict& verdict, const std::vector<StoredCase>& stored,
                    const std::function<Verdict(const Case&)>& run, int depth) {
  const auto all = features(drawn);
  for (const StoredCase& one : stored) {
    if (!is_known(one, verdict)) continue;
    const auto needed = features(one.drawn);
    if (!std::includes(all.begin(), all.end(), needed.begin(), needed.end())) continue;
    for (const std::string& feature : needed) {
      const auto candidate = without(drawn, feature);
      if (!candidate || candidate->events.empty()) continue;
      const Verdict then = run(*candidate);
      if (!then.is_fault() || (depth > 0 && !explain(*candidate, then, stored, run, depth - 1).empty()))
        return one.name;
    }
  }
  return {};
}

}  // namespace ddpkit::fuzz
