#include "case.h"

namespace ddpkit::fuzz {

using nlohmann::json;

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Node, kind, dtype, layout, layout_rank, tie, tie_by, uses, when, sparse,
                                                checkpoint, recomputed, frozen, ignored, detach)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Wrapper, kind, bucket_cap_mb, arena, view, find_unused, static_graph,
                                                broadcast_buffers, hook, output, units, min_unit_mb, reshard, scope)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(OptimizerChoice, kind, engine, groups, momentum, weight_decay, nesterov,
                                                amsgrad, maximize, in_backward, own_weights, scaler, schedule)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Event, kind, slots, how, node, rank, value, counts)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Case, data, world, backend, dtype, autocast, width, rows, magnitude,
                                                other_starts, twice, nodes, wrapper, optimizer, events)

namespace {

/// Returns `value` without the keys that are equal in `standard`. Compares members of an array with a default one.
json without_defaults(const json& value, const json& standard) {
  json result = json::object();
  for (const auto& [key, item] : value.items()) {
    if (item.is_object()) {
      if (const json inner = without_defaults(item, standard.at(key)); !inner.empty()) result[key] = inner;
    } else if (key == "nodes" || key == "events") {
      const json member = key == "nodes" ? json(Node{}) : json(Event{});
      result[key] = json::array();
      for (const json& one : item) result[key].push_back(without_defaults(one, member));
    } else if (item != standard.at(key)) {
      result[key] = item;
    }
  }
  return result;
}

void check_keys(const json& value, const json& standard) {
  for (const auto& [key, item] : value.items()) {
    if (!standard.contains(key)) throw std::invalid_argument("a case has no key \"" + key + "\"");
  }
}

void add_features(const std::string& prefix, const json& value, std::multiset<std::string>& found) {
  for (const auto& [key, item] : value.items()) {
    // Indices and seeds: their value is not a feature.
    if (key == "data" || key == "width" || key == "rows" || key == "node" || key == "counts" || key == "value")
      continue;
    if (item.is_object()) {
      add_features(key + ".", item, found);
    } else if (key == "nodes" || key == "events") {
      for (const json& one : item) add_features(key == "nodes" ? "node." : "event.", one, found);
    } else if (item.is_string()) {
      found.insert(prefix + key + "=" + item.get<std::string>());
    } else {
      found.insert(prefix + key);
    }
  }
}

}  // namespace

json to_json(const Case& drawn) { return without_defaults(json(drawn), json(Case{})); }

Case from_json(const json& value) {
  const json standard = json(Case{});
  check_keys(value, standard);
  if (value.contains("wrapper")) check_keys(value["wrapper"], standard["wrapper"]);
  if (value.contains("optimizer")) check_keys(value["optimizer"], standard["optimizer"]);
  for (const json& node : value.value("nodes", json::array())) check_keys(node, json(Node{}));
  for (const json& event : value.value("events", json::array())) check_keys(event, json(Event{}));
  return value.get<Case>();
}

std::set<std::string> features(const Case& drawn) {
  std::multiset<std::string> found;
  add_features("", to_json(drawn), found);
  return {found.begin(), found.end()};
}

std::size_t count_feature(const Case& drawn, const std::string& feature) {
  std::multiset<std::string> found;
  add_features("", to_json(drawn), found);
  return found.count(feature);
}

}  // namespace ddpkit::fuzz
