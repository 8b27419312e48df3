#include "train/checkpoint_archive.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>
#include <ddpkit/optim/sharded_optimizer.h>

#include "optim/shards.h"
#include "train/archive_writer.h"
#include "train/checkpoint_shards.h"
#include "train/generator_seed.h"
#include "train/rank_state.h"
#include "train/sealed_file.h"

namespace ddpkit::train {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr std::string_view kFormat = "ddpkit checkpoint 2";
constexpr std::string_view kShardedFormat = "ddpkit sharded checkpoint 1";
constexpr std::string_view kZipStart = "PK\x03\x04";
constexpr std::string_view kZipEnd = "PK\x05\x06";

/// A fused optimizer has the archive format of its torch::optim counterpart.
std::string kind_named(const std::string& type) {
  const std::string_view fused = "ddpkit::optim::Fused";
  return type.starts_with(fused) ? "torch::optim::" + type.substr(fused.size()) : type;
}

/// A sharded optimizer has the archive format of its inner optimizer.
std::string kind_of(const torch::optim::Optimizer& optimizer) {
  if (const auto* sharded = dynamic_cast<const optim::ShardedOptimizerBase*>(&optimizer))
    return kind_of(*optim::Shards::of(*sharded).inner);
  return kind_named(c10::demangle(typeid(optimizer).name()));
}

// A checkpoint with a checked format.
struct OpenCheckpoint {
  InputArchive archive;
  CheckpointInfo info;
  std::vector<std::string> shards;  ///< Names of files; empty if the archive has model and optimizer.
};

class Bytes : public caffe2::serialize::ReadAdapterInterface {
 public:
  explicit Bytes(std::string_view bytes) : bytes_(bytes) {}
  std::size_t size() const override { return bytes_.size(); }
  std::size_t read(std::uint64_t place, void* destination, std::size_t count, const char*) const override {
    if (place > bytes_.size()) return 0;
    return bytes_.substr(place).copy(static_cast<char*>(destination), count);
  }

 private:
  std::string_view bytes_;
};

// Torch archives may contain TorchScript, which runs when it is loaded. Classes in a checkpoint have no functions.
void refuse_code(const std::string& path, const std::string& bytes) {
  caffe2::serialize::PyTorchStreamReader archive(std::make_shared<Bytes>(bytes));
  for (const std::string& name : archive.getAllRecords()) {
    if (!name.starts_with("code/")) continue;
    const auto [data, size] = archive.getRecord(name);
    if (std::string_view(static_cast<const char*>(data.get()), size).find("def ") != std::string_view::npos)
      throw InvalidArgument(fmt::format("{} holds code, which no checkpoint does: it is not read", path));
  }
}

OpenCheckpoint open_checkpoint(const std::string& path, const std::string& bytes) {
  if (!std::string_view(bytes).starts_with(kZipStart)) {
    throw InvalidArgument(fmt::format("{} is not a checkpoint (it is no archive that torch writes)", path));
  }
  switch (check_seal(bytes)) {
    case SealState::kNone:
      // The directory of a zip file is at the end of the file: a truncated file has none.
      if (bytes.rfind(kZipEnd) == std::string::npos)
        throw InvalidArgument(fmt::format(
            "the checkpoint {} is truncated: it ends after {} bytes, before its directory", path, bytes.size()));
      throw InvalidArgument(
          fmt::format("{} has no checksum at its end: it is not a checkpoint of this version, or a damaged one", path));
    case SealState::kBroken:
      throw InvalidArgument(
          fmt::format("the checkpoint {} is damaged: its checksum does not fit its {} bytes", path, bytes.size()));
    case SealState::kWhole:
      break;
  }
  OpenCheckpoint checkpoint;
  try {
    refuse_code(path, bytes);
    checkpoint.archive.load_from(bytes.data(), bytes.size());
    c10::IValue value;
    if (!checkpoint.archive.try_read("format", value) || !value.isString() ||
        (value.toStringRef() != kFormat && value.toStringRef() != kShardedFormat))
      throw InvalidArgument(fmt::format("{} is a torch archive, but not a checkpoint that this version wrote", path));
    if (value.toStringRef() == kShardedFormat) {
      checkpoint.archive.read("shards", value);
      for (const c10::IValue& name : value.toListRef()) checkpoint.shards.push_back(name.toStringRef());
    }
    checkpoint.archive.read("epoch", value);
    checkpoint.info.epoch = value.toInt();
    checkpoint.archive.read("step", value);
    checkpoint.info.step = value.toInt();
    checkpoint.archive.read("config", value);
    checkpoint.info.config = value.toStringRef();
    checkpoint.archive.read("ranks", value);
    checkpoint.info.ranks = static_cast<int>(value.toInt());
  } catch (const InvalidArgument&) {
    throw;
  } catch (const std::exception&) {
    throw InvalidArgument(fmt::format("the checkpoint {} is damaged: torch cannot read it", path));
  }
  return checkpoint;
}

// A tensor of the model and its restored value.
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

// Pairs every tensor of `module` with its value in the archive, in the model's order. Throws for additional tensors in
// the archive.
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

// Pairs every buffer with its value in the index of a sharded checkpoint.
void match_buffers(const std::string& path, InputArchive& archive, torch::nn::Module& module,
                   std::vector<Restored>& restored) {
  std::size_t number = 0;
  for (const auto& item : module.named_buffers()) {
    at::Tensor value;
    if (!archive.try_read(fmt::format("buffer_{}", number++), value, /*is_buffer=*/true) ||
        value.sizes() != item.value().sizes() || value.scalar_type() != item.value().scalar_type())
      throw_other_model(path, fmt::format("its buffer {} differs", item.key()));
    restored.push_back({item.value(), value});
  }
}

[[noreturn]] void throw_damaged(const std::string& path) {
  throw InvalidArgument(fmt::format("the checkpoint {} is damaged: torch cannot read it", path));
}

// Reads the state of this rank.
RankState match_rank_state(const std::string& path, InputArchive& archive, torch::nn::Module& module,
                           const std::vector<CheckpointPart>& parts, int rank) {
  at::Tensor state;
  archive.read(fmt::format("rank_{}", rank), state, /*is_buffer=*/true);
  const auto* bytes = static_cast<const char*>(state.const_data_ptr());
  return RankState(path, std::string(bytes, bytes + state.nbytes()), module, parts);
}

}  // namespace

CheckpointInfo info_of_archive(const std::string& path, const std::string& bytes) {
  return open_checkpoint(path, bytes).info;
}

std::vector<std::string> shards_of_archive(const std::string& path, const std::string& bytes) {
  return open_checkpoint(path, bytes).shards;
}

std::function<CheckpointInfo()> read_archive(const std::string& path, const std::string& bytes,
                                             torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                                             const std::vector<CheckpointPart>& parts, int rank, int world_size) {
  struct State {
    OpenCheckpoint checkpoint;
    std::vector<Restored> restored;
    std::optional<ShardsToRestore> shards;
    InputArchive optimizer;
    std::vector<InputArchive> parts;
    std::optional<RankState> rank_state;
  };
  const auto state = std::make_shared<State>();
  OpenCheckpoint& checkpoint = state->checkpoint = open_checkpoint(path, bytes);
  try {
    if (checkpoint.shards.empty()) {
      InputArchive model;
      checkpoint.archive.read("model", model);
      match_module(path, model, "", module, state->restored);
    } else {
      match_buffers(path, checkpoint.archive, module, state->restored);
      state->shards = read_shards(path, checkpoint.shards, module, optimizer, rank, world_size);
    }
    c10::IValue kind;
    checkpoint.archive.read("optimizer_kind", kind);
    if (kind_named(kind.toStringRef()) != kind_of(optimizer)) {
      throw InvalidArgument(fmt::format("the checkpoint {} was made with {}, this run uses {}", path,
                                        kind.toStringRef(), kind_of(optimizer)));
    }
    if (!state->shards) checkpoint.archive.read("optimizer", state->optimizer);
    state->parts.resize(parts.size());
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (!parts[i].of_each_rank && !checkpoint.archive.try_read("part_" + parts[i].name, state->parts[i]))
        throw InvalidArgument(fmt::format("the checkpoint {} has no {}, which this run needs", path, parts[i].name));
    }
    if (checkpoint.info.ranks == world_size)
      state->rank_state = match_rank_state(path, checkpoint.archive, module, parts, rank);
  } catch (const c10::Error&) {
    throw_damaged(path);
  }
  return [state, path, &optimizer, &parts] {
    try {
      if (state->shards)
        state->shards->put_optimizer();
      else
        optim::load_archive(optimizer, state->optimizer);
      for (std::size_t i = 0; i < parts.size(); ++i) {
        if (!parts[i].of_each_rank) parts[i].load(state->parts[i]);
      }
    } catch (const c10::Error&) {
      throw_damaged(path);
    }
    const at::NoGradGuard no_grad;
    if (state->shards) state->shards->put_parameters();
    for (const Restored& tensor : state->restored) at::Tensor(tensor.target).copy_(tensor.value);
    if (state->rank_state)
      state->rank_state->put_into_place();
    else
      note_restored_generators(std::nullopt);
    return state->checkpoint.info;
  };
}

namespace {

/// Writes what both kinds of archives have, and closes the archive.
void write_rest(const Sink& sink, OutputArchive& archive, const torch::optim::Optimizer& optimizer,
                const CheckpointInfo& info, const std::vector<CheckpointPart>& parts,
                const std::vector<std::string>& rank_states) {
  archive.write("epoch", c10::IValue(info.epoch));
  archive.write("step", c10::IValue(info.step));
  archive.write("config", c10::IValue(info.config));
  archive.write("optimizer_kind", c10::IValue(kind_of(optimizer)));
  write_parts(archive, parts);
  archive.write("ranks", c10::IValue(static_cast<std::int64_t>(rank_states.size())));
  for (std::size_t rank = 0; rank < rank_states.size(); ++rank) {
    const std::string& state = rank_states[rank];
    const at::Tensor bytes = at::empty({static_cast<std::int64_t>(state.size())}, at::kByte);
    std::copy(state.begin(), state.end(), bytes.mutable_data_ptr<std::uint8_t>());
    archive.write(fmt::format("rank_{}", rank), bytes, /*is_buffer=*/true);
  }

  ArchiveWriter writer(sink);
  archive.save_to([&](const void* data, std::size_t bytes) { return writer.write(data, bytes); });
  writer.finish();
}

}  // namespace

void write_parts(OutputArchive& archive, const std::vector<CheckpointPart>& parts) {
  for (const CheckpointPart& part : parts) {
    if (part.of_each_rank) continue;
    OutputArchive nested(archive.compilation_unit());
    part.save(nested);
    archive.write("part_" + part.name, nested);
  }
}

void write_archive(const Sink& sink, const torch::nn::Module& module, const torch::optim::Optimizer& optimizer,
                   const CheckpointInfo& info, const std::vector<CheckpointPart>& parts,
                   const std::vector<std::string>& rank_states) {
  OutputArchive archive;
  archive.write("format", c10::IValue(std::string(kFormat)));
  OutputArchive model(archive.compilation_unit());
  module.save(model);
  archive.write("model", model);
  OutputArchive state(archive.compilation_unit());
  optimizer.save(state);
  archive.write("optimizer", state);
  write_rest(sink, archive, optimizer, info, parts, rank_states);
}

void write_index(const Sink& sink, const torch::nn::Module& module, const torch::optim::Optimizer& optimizer,
                 const CheckpointInfo& info, const std::vector<CheckpointPart>& parts,
                 const std::vector<std::string>& rank_states, const std::vector<std::string>& shards) {
  OutputArchive archive;
  std::size_t number = 0;
  for (const at::Tensor& buffer : module.buffers())
    archive.write(fmt::format("buffer_{}", number++), buffer.detach(), /*is_buffer=*/true);
  archive.write("format", c10::IValue(std::string(kShardedFormat)));
  archive.write("shards", c10::IValue(c10::List<std::string>(at::ArrayRef<std::string>(shards))));
  write_rest(sink, archive, optimizer, info, parts, rank_states);
}

}  // namespace ddpkit::train
