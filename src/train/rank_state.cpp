#include "train/rank_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <memory>
#include <mutex>
#include <optional>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>

#include "parallel/model_agreement.h"
#include "train/generator_seed.h"

namespace ddpkit::train {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// Generators of the CPU, then of the GPUs that this process has used.
std::vector<at::Generator> generators(const c10::Device& device) {
  std::vector<at::Generator> all = {at::detail::getDefaultCPUGenerator()};
  if (!device.is_cpu()) all.push_back(at::globalContext().defaultGenerator(device));
  return all;
}

c10::Device device_of(const torch::nn::Module& module) {
  for (const at::Tensor& parameter : module.parameters()) return parameter.device();
  return at::kCPU;
}

std::string to_bytes(OutputArchive& archive) {
  std::string bytes;
  archive.save_to([&](const void* data, std::size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  return bytes;
}

}  // namespace

std::string rank_state(const torch::nn::Module& module, const std::vector<CheckpointPart>& parts, bool with_buffers) {
  OutputArchive archive;
  std::size_t number = 0;
  for (at::Generator& generator : generators(device_of(module))) {
    const std::lock_guard lock(generator.mutex());
    archive.write(fmt::format("generator_{}", number++), generator.get_state(), /*is_buffer=*/true);
  }
  if (const auto seed = generator_seed())
    archive.write("generator_seed", c10::IValue(static_cast<std::int64_t>(*seed)));
  if (with_buffers) {
    number = 0;
    for (const at::Tensor& buffer : module.buffers())
      archive.write(fmt::format("buffer_{}", number++), buffer.detach(), /*is_buffer=*/true);
  }
  for (const CheckpointPart& part : parts) {
    if (!part.of_each_rank) continue;
    OutputArchive nested(archive.compilation_unit());
    part.save(nested);
    archive.write("part_" + part.name, nested);
  }
  return to_bytes(archive);
}

std::vector<std::string> gather_rank_states(const torch::nn::Module& module, const std::vector<CheckpointPart>& parts,
                                            const ProcessGroup& group, bool check_parameters) {
  constexpr const char* kCall = "Checkpoint";
  if (check_parameters && group.world_size() > 1) {
    check_same_model(group, kCall,
                     "the checkpoint is not written, because the parameters differ between ranks (a rank took a step "
                     "alone, or wrote to a parameter outside the optimizer; if the values should differ, set "
                     "check_parameters of CheckpointOptions to false)",
                     [&] { return describe_values("parameter", module.named_parameters().pairs()); });
  }
  const bool buffers_differ =
      first_difference(texts_of_all_ranks(group, kCall, [&] {
        return fmt::format("{}", fmt::join(describe_values("buffer", module.named_buffers().pairs()), "\n"));
      })).has_value();
  return texts_of_all_ranks(group, kCall, [&] { return rank_state(module, parts, buffers_differ); });
}

RankState::RankState(const std::string& path, const std::string& bytes, torch::nn::Module& module,
                     const std::vector<CheckpointPart>& parts) {
  auto archive = std::make_shared<InputArchive>();
  archive->load_from(bytes.data(), bytes.size());
  std::size_t number = 0;
  for (at::Generator& generator : generators(device_of(module))) {
    at::Tensor state;
    // A run may have moved between GPU and CPU.
    if (!archive->try_read(fmt::format("generator_{}", number++), state, /*is_buffer=*/true)) continue;
    steps_.emplace_back([generator, state]() mutable {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    });
  }
  c10::IValue seed;
  const bool has_seed = archive->try_read("generator_seed", seed);
  steps_.emplace_back([seed = has_seed ? std::optional(static_cast<std::uint64_t>(seed.toInt())) : std::nullopt] {
    note_restored_generators(seed);
  });
  number = 0;
  for (const at::Tensor& buffer : module.buffers()) {
    at::Tensor value;
    if (!archive->try_read(fmt::format("buffer_{}", number++), value, /*is_buffer=*/true)) break;
    if (value.sizes() != buffer.sizes() || value.scalar_type() != buffer.scalar_type())
      throw InvalidArgument(fmt::format("the checkpoint {} is of another model: its buffer {} differs", path, number));
    steps_.emplace_back([buffer, value] { buffer.copy_(value); });
  }
  for (const CheckpointPart& part : parts) {
    if (!part.of_each_rank) continue;
    auto nested = std::make_shared<InputArchive>();
    if (!archive->try_read("part_" + part.name, *nested))
      throw InvalidArgument(fmt::format("the checkpoint {} has no {}, which this run needs", path, part.name));
    steps_.emplace_back([load = part.load, archive, nested] { load(*nested); });
  }
}

void RankState::put_into_place() {
  const at::NoGradGuard no_grad;
  for (const auto& step : steps_) step();
}

}  // namespace ddpkit::train
