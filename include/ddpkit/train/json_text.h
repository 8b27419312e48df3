// Tier 0 and nlohmann-json.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace ddpkit::train {

/// `json` as text. Bytes that are no UTF-8, as the name of a file or a label may hold them, are shown as such rather
/// than refused, which is what dump() does.
template <class Json>
std::string json_text(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

}  // namespace ddpkit::train
