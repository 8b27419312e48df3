#include "parallel/sharding/unit_plan.h"

#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <string_view>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "parallel/sharding/gathered_use.h"

namespace ddpkit {
namespace {

bool is_list(const torch::nn::Module& module) {
  return module.as<torch::nn::ModuleListImpl>() || module.as<torch::nn::ModuleDictImpl>() ||
         module.as<torch::nn::SequentialImpl>();
}

void find_children_of_lists(const torch::nn::Module& module, const std::string& prefix,
                            std::vector<std::string>& names) {
  for (const auto& child : module.named_children()) {
    const std::string name = prefix + child.key();
    if (is_list(module)) {
      names.push_back(name);
    } else {
      find_children_of_lists(*child.value(), name + '.', names);
    }
  }
}

/// Removes the first part of a name in parts and returns it.
std::string_view take_part(std::string_view& name) {
  const std::size_t end = std::min(name.find('.'), name.size());
  const std::string_view part = name.substr(0, end);
  name.remove_prefix(std::min(end + 1, name.size()));
  return part;
}

bool matches(std::string_view name, std::string_view pattern) {
  while (!name.empty() && !pattern.empty()) {
    const std::string_view part = take_part(name), expected = take_part(pattern);
    if (expected != "*" && expected != part) return false;
  }
  return name.empty() && pattern.empty();
}

std::vector<std::string> find_matches(const torch::nn::Module& module, const std::vector<std::string>& patterns) {
  const auto modules = module.named_modules(/*name_prefix=*/std::string(), /*include_self=*/false);
  std::vector<bool> found(patterns.size(), false);
  std::vector<std::string> names;
  for (const auto& item : modules) {
    bool is_unit = false;
    for (std::size_t i = 0; i < patterns.size(); ++i) {
      if (!matches(item.key(), patterns[i])) continue;
      found[i] = is_unit = true;
    }
    if (is_unit) names.push_back(item.key());
  }
  for (std::size_t i = 0; i < patterns.size(); ++i) {
    if (!found[i]) throw InvalidArgument(fmt::format("units has \"{}\", but no module has such a name", patterns[i]));
  }
  return names;
}

std::size_t bytes_of(const UnitPlan& unit) {
  std::size_t bytes = 0;
  for (const NamedParameter& parameter : unit.parameters) bytes += parameter.tensor.nbytes();
  return bytes;
}

std::vector<UnitPlan> merge_small(std::vector<UnitPlan> units, std::size_t min_bytes) {
  struct Group {
    std::string first, last;
    UnitPlan unit;
  };
  std::vector<Group> groups;
  for (UnitPlan& unit : units) {
    if (unit.parameters.empty()) continue;
    if (groups.empty() || bytes_of(groups.back().unit) >= min_bytes) {
      groups.push_back({.first = unit.name, .last = unit.name, .unit = std::move(unit)});
      continue;
    }
    Group& group = groups.back();
    group.last = unit.name;
    std::move(unit.parameters.begin(), unit.parameters.end(), std::back_inserter(group.unit.parameters));
  }
  std::vector<UnitPlan> merged;
  for (Group& group : groups) {
    if (group.first != group.last) group.unit.name = fmt::format("{} to {}", group.first, group.last);
    merged.push_back(std::move(group.unit));
  }
  return merged;
}

}  // namespace

std::vector<UnitPlan> plan_units(const torch::nn::Module& module, const std::vector<std::string>& patterns,
                                 std::size_t min_bytes) {
  std::vector<std::string> names;
  if (patterns.empty()) {
    find_children_of_lists(module, "", names);
  } else {
    names = find_matches(module, patterns);
  }
  std::vector<UnitPlan> units;
  for (const std::string& name : names) units.push_back({.name = name, .parameters = {}});
  UnitPlan root{.name = "root", .parameters = {}, .is_root = true};
  std::unordered_set<const void*> seen;
  for (const auto& item : module.named_parameters()) {
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second || GatheredParameter::is_gathered(item.value()))
      continue;
    UnitPlan* owner = &root;
    std::size_t length = 0;
    for (UnitPlan& unit : units) {
      if (unit.name.size() > length && item.key().starts_with(unit.name + '.')) {
        owner = &unit;
        length = unit.name.size();
      }
    }
    owner->parameters.push_back({.name = item.key(), .tensor = item.value()});
  }
  std::vector<UnitPlan> all = merge_small(std::move(units), min_bytes);
  if (!root.parameters.empty()) all.push_back(std::move(root));
  return all;
}

}  // namespace ddpkit
