#include <ddpkit/train/checkpoint.h>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <exception>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/comm/error.h>
#include <ddpkit/comm/process_group.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/train/atomic_file.h>
#include <ddpkit/train/together.h>

#include "archive_writer.h"

namespace ddpkit::train {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr std::string_view kFormat = "ddpkit checkpoint 1";
constexpr std::string_view kZipStart = "PK\x03\x04";
constexpr std::string_view kZipEnd = "PK\x05\x06";

/// A sharded optimizer writes and reads what the one inside does on a process alone.
std::string kind_of(const torch::optim::Optimizer& optimizer) {
  if (const auto* sharded = dynamic_cast<const optim::ShardedOptimizerBase*>(&optimizer))
    return kind_of(sharded->inner());
  return c10::demangle(typeid(optimizer).name());
}

std::string read_bytes(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    throw InvalidArgument(fmt::format("there is no checkpoint {}", path.string()));
  }
  std::ifstream file(path, std::ios::binary);
  std::string bytes;
  if (file) bytes.assign(std::istreambuf_iterator<char>(file), {});
  if (!file) throw InvalidArgument(fmt::format("cannot read the checkpoint {}", path.string()));
  return bytes;
}

// A checkpoint whose format has been checked.
struct OpenCheckpoint {
  InputArchive archive;
  CheckpointInfo info;
};

OpenCheckpoint open_checkpoint(const std::string& path, const std::string& bytes) {
  if (!std::string_view(bytes).starts_with(kZipStart)) {
    throw InvalidArgument(fmt::format("{} is not a checkpoint (it is no archive that torch writes)", path));
  }
  // A zip file's directory stands at its end, behind the last tensor: a file cut anywhere has lost it.
  if (bytes.rfind(kZipEnd) == std::string::npos) {
    throw InvalidArgument(fmt::format("the checkpoint {} is truncated: it ends after {} bytes, before its directory",
                                      path, bytes.size()));
  }
  OpenCheckpoint checkpoint;
  c10::IValue format;
  try {
    checkpoint.archive.load_from(bytes.data(), bytes.size());
    if (checkpoint.archive.try_read("format", format) && format.isString() && format.toStringRef() == kFormat) {
      c10::IValue value;
      checkpoint.archive.read("epoch", value);
      checkpoint.info.epoch = value.toInt();
      checkpoint.archive.read("step", value);
      checkpoint.info.step = value.toInt();
      checkpoint.archive.read("config", value);
      checkpoint.info.config = value.toStringRef();
      return checkpoint;
    }
  } catch (const std::exception&) {
    throw InvalidArgument(fmt::format("the checkpoint {} is damaged: torch cannot read it", path));
  }
  throw InvalidArgument(fmt::format("{} is a torch archive, but not a checkpoint that this version wrote", path));
}

// A tensor of the model and the value it will get.
struct Restored {
  at::Tensor target;
  at::Tensor value;
};

[[noreturn]] void throw_other_model(const std::string& path, const std::string& difference) {
  throw InvalidArgument(fmt::format("the checkpoint {} is of another model: {}", path, difference));
}

Restored match(const std::string& path, InputArchive& archive, const std::string& prefix, const std::string& key,
               const at::Tensor& target, bool is_buffer) {
  at::Tensor value;
  if (!archive.try_read(key, value, is_buffer) || !value.defined()) {
    throw_other_model(path, fmt::format("it has no {}{}", prefix, key));
  }
  if (value.sizes() != target.sizes() || value.scalar_type() != target.scalar_type()) {
    throw_other_model(path, fmt::format("{}{} is {} [{}] there and {} [{}] here", prefix, key,
                                        c10::toString(value.scalar_type()), fmt::join(value.sizes(), ", "),
                                        c10::toString(target.scalar_type()), fmt::join(target.sizes(), ", ")));
  }
  return {target, value};
}

// Pairs every tensor of `module` with its value in the archive, in the model's order, and looks for what it has too
// many.
void match_module(const std::string& path, InputArchive& archive, const std::string& prefix, torch::nn::Module& module,
                  std::vector<Restored>& restored) {
  std::vector<std::string> names;
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    names.push_back(item.key());
    if (item.value().defined()) {
      restored.push_back(match(path, archive, prefix, item.key(), item.value(), /*is_buffer=*/false));
    }
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    names.push_back(item.key());
    if (item.value().defined()) {
      restored.push_back(match(path, archive, prefix, item.key(), item.value(), /*is_buffer=*/true));
    }
  }
  for (const auto& child : module.named_children()) {
    if (!child.value()->is_serializable()) continue;
    names.push_back(child.key());
    InputArchive nested;
    if (!archive.try_read(child.key(), nested))
      throw_other_model(path, fmt::format("it has no {}{}", prefix, child.key()));
    match_module(path, nested, prefix + child.key() + ".", *child.value(), restored);
  }
  for (const std::string& key : archive.keys()) {
    c10::IValue value;
    if (std::find(names.begin(), names.end(), key) != names.end() || !archive.try_read(key, value)) continue;
    if (value.isModule() || (value.isTensor() && value.toTensor().defined())) {
      throw_other_model(path, fmt::format("its {}{} is not here", prefix, key));
    }
  }
}

CheckpointInfo restore(const std::string& path, const std::string& bytes, torch::nn::Module& module,
                       torch::optim::Optimizer& optimizer, const std::vector<CheckpointPart>& parts) {
  OpenCheckpoint checkpoint = open_checkpoint(path, bytes);
  std::vector<Restored> restored;
  c10::IValue kind;
  try {
    InputArchive model;
    checkpoint.archive.read("model", model);
    match_module(path, model, "", module, restored);
    checkpoint.archive.read("optimizer_kind", kind);
    if (kind.toStringRef() != kind_of(optimizer)) {
      throw InvalidArgument(fmt::format("the checkpoint {} was made with {}, this run uses {}", path,
                                        kind.toStringRef(), kind_of(optimizer)));
    }
    InputArchive state;
    checkpoint.archive.read("optimizer", state);
    std::vector<InputArchive> archives(parts.size());
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (!checkpoint.archive.try_read("part_" + parts[i].name, archives[i]))
        throw InvalidArgument(fmt::format("the checkpoint {} has no {}, which this run needs", path, parts[i].name));
    }
    optimizer.load(state);
    for (std::size_t i = 0; i < parts.size(); ++i) parts[i].load(archives[i]);
  } catch (const c10::Error&) {
    throw InvalidArgument(fmt::format("the checkpoint {} is damaged: torch cannot read it", path));
  }
  const at::NoGradGuard no_grad;
  for (const Restored& tensor : restored) at::Tensor(tensor.target).copy_(tensor.value);
  return checkpoint.info;
}

}  // namespace

void write_checkpoint(const std::filesystem::path& path, const torch::nn::Module& module,
                      const torch::optim::Optimizer& optimizer, const CheckpointInfo& info,
                      const std::vector<CheckpointPart>& parts) {
  OutputArchive archive;
  archive.write("format", c10::IValue(std::string(kFormat)));
  archive.write("epoch", c10::IValue(info.epoch));
  archive.write("step", c10::IValue(info.step));
  archive.write("config", c10::IValue(info.config));
  OutputArchive model(archive.compilation_unit());
  module.save(model);
  archive.write("model", model);
  archive.write("optimizer_kind", c10::IValue(kind_of(optimizer)));
  OutputArchive state(archive.compilation_unit());
  optimizer.save(state);
  archive.write("optimizer", state);
  for (const CheckpointPart& part : parts) {
    OutputArchive nested(archive.compilation_unit());
    part.save(nested);
    archive.write("part_" + part.name, nested);
  }

  AtomicFile file(path);
  ArchiveWriter writer(file);
  archive.save_to([&](const void* data, std::size_t bytes) { return writer.write(data, bytes); });
  writer.commit();
}

void save_checkpoint(const std::filesystem::path& path, const torch::nn::Module& module,
                     const torch::optim::Optimizer& optimizer, const CheckpointInfo& info, const ProcessGroup& group,
                     const std::vector<CheckpointPart>& parts) {
  if (const auto* sharded = dynamic_cast<const optim::ShardedOptimizerBase*>(&optimizer)) sharded->consolidate_state();
  run_together(group, [&] {
    if (group.rank() == 0) write_checkpoint(path, module, optimizer, info, parts);
  });
}

CheckpointInfo read_checkpoint(const std::filesystem::path& path, torch::nn::Module& module,
                               torch::optim::Optimizer& optimizer, const std::vector<CheckpointPart>& parts) {
  return restore(path.string(), read_bytes(path), module, optimizer, parts);
}

CheckpointInfo load_checkpoint(const std::filesystem::path& path, torch::nn::Module& module,
                               torch::optim::Optimizer& optimizer, const ProcessGroup& group,
                               const std::vector<CheckpointPart>& parts) {
  std::string bytes;
  run_together(group, [&] {
    if (group.rank() == 0) bytes = read_bytes(path);
  });
  bytes = broadcast_bytes(group, std::move(bytes));
  CheckpointInfo info;
  run_together(group, [&] { info = restore(path.string(), bytes, module, optimizer, parts); });
  return info;
}

CheckpointInfo read_checkpoint_info(const std::filesystem::path& path) {
  return open_checkpoint(path.string(), read_bytes(path)).info;
}

}  // namespace ddpkit::train
