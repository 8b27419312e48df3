// Tier 0 and nlohmann-json.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace ddpkit::train {

/// Returns `json` as text. Bytes that are not UTF-8, for example in file names or labels, become replacement
/// characters; dump() would throw.
template <class Json>
std::string json_text(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

}  // namespace ddpkit::train
