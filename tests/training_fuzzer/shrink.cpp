#include "shrink.h"

namespace ddpkit::fuzz {
namespace {

using nlohmann::json;

/// Removes node `index` and adjusts references to later nodes.
json without_node(json value, std::size_t index) {
  value["nodes"].erase(index);
  const auto follow = [&](json& owner, const char* key) {
    if (!owner.contains(key)) return;
    const int at = owner[key].get<int>();
    if (at == static_cast<int>(index)) owner.erase(key);
    if (at > static_cast<int>(index)) owner[key] = at - 1;
  };
  for (json& node : value["nodes"]) follow(node, "tie");
  for (json& event : value["events"])
    if (event.value("kind", "") != "clip") follow(event, "node");
  return value;
}

/// Reduces the world by one rank.
json with_fewer_ranks(json value) {
  const int world = value["world"].get<int>() - 1;
  value["world"] = world;
  const auto limit = [&](json& owner, const char* key) {
    if (owner.contains(key) && owner[key].get<int>() >= world) owner[key] = world - 1;
  };
  for (json& node : value["nodes"]) limit(node, "layout_rank");
  for (json& event : value["events"]) {
    limit(event, "rank");
    if (event.contains("counts")) event["counts"].erase(0);
  }
  return value;
}

void without_keys(const json& whole, const json::json_pointer& at, std::vector<json>& found) {
  for (const auto& [key, item] : whole.at(at).items()) {
    const auto here = at / key;
    if (item.is_object()) {
      without_keys(whole, here, found);
    } else if (key == "nodes" || key == "events") {
      for (std::size_t i = 0; i < item.size(); ++i) without_keys(whole, here / i, found);
    } else if (key != "counts" && key != "world" && !(at.to_string().find("/events/") == 0 && key == "kind")) {
      json smaller = whole;
      smaller.at(at).erase(key);
      found.push_back(smaller);
    }
  }
}

}  // namespace

std::vector<Case> smaller(const Case& drawn) {
  const json value = to_json(drawn);
  std::vector<json> found;
  const std::size_t events = drawn.events.size();
  for (std::size_t count = events / 2; count >= 1; count /= 2) {
    for (std::size_t first = events; first >= count; first -= count) {
      json one = value;
      for (std::size_t i = 0; i < count; ++i) one["events"].erase(first - 1 - i);
      found.push_back(one);
    }
  }
  if (drawn.nodes.size() > 1)
    for (std::size_t i = drawn.nodes.size(); i-- > 0;) found.push_back(without_node(value, i));
  if (drawn.world > 2) found.push_back(with_fewer_ranks(value));
  without_keys(value, json::json_pointer(), found);
  for (std::size_t i = 0; i < events; ++i) {
    for (std::size_t rank = 0; rank < drawn.events[i].counts.size(); ++rank) {
      if (drawn.events[i].counts[rank] == 0) continue;
      json one = value;
      one["events"][i]["counts"][rank] = drawn.events[i].counts[rank] - 1;
      found.push_back(one);
    }
  }
  std::vector<Case> cases;
  for (const json& one : found) cases.push_back(from_json(one));
  return cases;
}

Case shrink(Case drawn, const std::function<bool(const Case&)>& fails, int tries) {
  for (bool shrunk = true; shrunk;) {
    shrunk = false;
    auto candidates = smaller(drawn);
    for (std::size_t i = 0; i < candidates.size();) {
      if (tries-- <= 0) return drawn;
      if (!fails(candidates[i])) {
        ++i;
        continue;
      }
      drawn = candidates[i];
      candidates = smaller(drawn);  // The candidates before this one did not fail.
      shrunk = true;
    }
  }
  return drawn;
}

}  // namespace ddpkit::fuzz
