#include "parallel/dp/replica_handles.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/nn/cloneable.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>
#include <utility>

#include <ddpkit/error.h>

namespace ddpkit {
namespace {

using ModulePtr = std::shared_ptr<torch::nn::Module>;

/// A module whose clone is a given module.
class ClonedAs : public torch::nn::Module {
 public:
  explicit ClonedAs(ModulePtr module) : module_(std::move(module)) {}
  ModulePtr clone(const std::optional<at::Device>&) const override { return module_; }

 private:
  ModulePtr module_;
};

/// clone() copies the members of `from` to `to` with the private Cloneable::clone_(), which LibTorch uses to clone
/// children. clone_() knows the child's type.
class MemberCopy : public torch::nn::Cloneable<MemberCopy> {
 public:
  MemberCopy(const ModulePtr& from, ModulePtr to) : to_(std::move(to)) {
    register_module("part", std::make_shared<ClonedAs>(from));
  }
  void reset() override { register_module("part", to_); }

 private:
  ModulePtr to_;
};

/// Returns false if the type has no clone_().
bool copy_members(const ModulePtr& from, const ModulePtr& to) {
  try {
    MemberCopy(from, to).clone();
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

/// A tensor or a module.
struct Handle {
  at::Tensor tensor = {};
  ModulePtr module = {};

  const void* identity() const {
    return module ? static_cast<const void*>(module.get()) : tensor.unsafeGetTensorImpl();
  }
  long references() const { return module ? module.use_count() : static_cast<long>(tensor.use_count()); }
};

/// The module's object with one or several names, and the clone's objects with these names.
struct Entry {
  std::string name;  ///< Includes its kind.
  Handle source;
  std::vector<Handle> copies = {};
};

using Counts = std::vector<long>;  // [entry]

void add(std::vector<Entry>& entries, std::string name, const Handle& source, const Handle& copy) {
  const auto same = [](const Handle& handle) {
    return [&handle](const auto& other) { return other.identity() == handle.identity(); };
  };
  auto entry = std::find_if(entries.begin(), entries.end(), [&](const Entry& one) { return same(source)(one.source); });
  if (entry == entries.end()) entry = entries.insert(entries.end(), {.name = std::move(name), .source = source});
  if (std::none_of(entry->copies.begin(), entry->copies.end(), same(copy))) entry->copies.push_back(copy);
}

Counts count_sources(const std::vector<Entry>& entries) {
  Counts counts;
  for (const Entry& entry : entries) counts.push_back(entry.source.references());
  return counts;
}

Counts count_copies(const std::vector<Entry>& entries) {
  Counts counts(entries.size());
  for (std::size_t e = 0; e < entries.size(); ++e)
    for (const Handle& copy : entries[e].copies) counts[e] += copy.references();
  return counts;
}

Counts difference(Counts after, const Counts& before) {
  for (std::size_t e = 0; e < after.size(); ++e) after[e] -= before[e];
  return after;
}

/// Number of references from one part to each entry.
struct Part {
  std::string name;
  Counts of_module, of_clone;
};

std::vector<Part> count_parts(const std::vector<Entry>& entries, ReplicaModules& modules) {
  std::set<const void*> seen;
  for (std::size_t i = 0; i < modules.names.size(); ++i) {
    ModulePtr& scratch = modules.scratch[i];
    // Afterwards no part of `scratch` refers to another part.
    if (!seen.insert(scratch.get()).second || !copy_members(modules.clone[i], scratch)) scratch.reset();
  }
  std::vector<Part> parts;
  for (std::size_t i = 0; i < modules.names.size(); ++i) {
    ModulePtr& scratch = modules.scratch[i];
    if (!scratch) continue;
    Part& part = parts.emplace_back();
    part.name = modules.names[i];
    const Counts copies = count_copies(entries), foreign_sources = count_sources(entries);
    copy_members(modules.original[i], scratch);
    const Counts sources = count_sources(entries);
    scratch.reset();
    const Counts rest = count_sources(entries), foreign = difference(foreign_sources, rest);
    part.of_module = difference(sources, rest);
    part.of_clone = difference(copies, count_copies(entries));
    for (std::size_t e = 0; e < entries.size(); ++e) {
      const bool shared = entries[e].copies[0].identity() == entries[e].source.identity();
      if (foreign[e] != 0 && !shared)
        throw InvalidArgument(
            fmt::format("DataParallel cannot replicate module {}: its clone refers to {} of the original. In reset(), "
                        "assign each member again, and clear containers before filling them",
                        part.name, entries[e].name));
    }
  }
  return parts;
}

bool is_like(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() && a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type();
}

/// Returns whether only this part refers to the entry or its only copy, and only by registration. Members of the clone
/// that refer to the copy then do not refer to the entry in the module.
bool is_unused(const std::vector<Entry>& entries, const std::vector<Part>& parts, const Part& part, std::size_t entry) {
  return entries[entry].copies.size() == 1 && part.of_module[entry] == 1 &&
         std::all_of(parts.begin(), parts.end(), [&](const Part& other) {
           return &other == &part || (other.of_module[entry] == 0 && other.of_clone[entry] == 0);
         });
}

}  // namespace

void match_handles(ReplicaModules modules, std::vector<ReplicaRow>& rows) {
  std::vector<Entry> entries;
  for (const ReplicaRow& row : rows)
    add(entries, fmt::format("{} {}", row.kind, row.name), {.tensor = row.source}, {.tensor = row.copies[0]});
  for (std::size_t i = 0; i < modules.names.size(); ++i)
    add(entries, "module " + modules.names[i], {.module = modules.original[i]}, {.module = modules.clone[i]});
  const std::vector<Part> parts = count_parts(entries, modules);
  for (const Part& part : parts) {
    Counts missing = difference(part.of_module, part.of_clone);
    for (std::size_t lost = 0; lost < entries.size(); ++lost) {
      if (missing[lost] >= 0 || !is_unused(entries, parts, part, lost)) continue;
      std::vector<std::size_t> candidates;
      for (std::size_t e = 0; e < entries.size(); ++e)
        if (part.of_module[e] > part.of_clone[e] && is_like(entries[e].source.tensor, entries[lost].source.tensor))
          candidates.push_back(e);
      if (candidates.size() != 1) continue;
      missing[candidates[0]] += std::exchange(missing[lost], 0);
      for (ReplicaRow& row : rows)
        if (row.source.is_same(entries[lost].source.tensor)) row.source = entries[candidates[0]].source.tensor;
    }
    for (std::size_t e = 0; e < entries.size(); ++e) {
      if (missing[e] != 0)
        throw InvalidArgument(
            fmt::format("DataParallel cannot replicate module {}: it refers to {} {} times, but its clone {} times. "
                        "Assign the member in reset(), to a tensor or module that reset() registers, or use "
                        "DistributedDataParallel, which does not clone",
                        part.name, entries[e].name, part.of_module[e], part.of_clone[e]));
    }
  }
}

}  // namespace ddpkit
