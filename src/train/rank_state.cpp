#include "train/rank_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>

#include <fmt/format.h>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>
#include <ddpkit/train/together.h>

#include "train/generator_seed.h"
#include "train/state/crc32.h"

namespace ddpkit::train {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// CPU's, then those of the GPUs that this process has used.
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

constexpr std::size_t kChecksumBytes = 8;

std::string checksum_of(const std::vector<at::Tensor>& tensors) {
  std::uint32_t checksum = 0;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor host = tensor.detach().cpu().contiguous();
    checksum = crc32c(host.const_data_ptr(), host.nbytes(), checksum);
  }
  return fmt::format("{:08x}", checksum);
}

/// `checksums`: of the buffers of each rank, then of each parameter. [rank]
void check_same_parameters(const std::vector<std::string>& checksums, const std::vector<std::string>& names) {
  for (std::size_t r = 1; r < checksums.size(); ++r) {
    const auto fail = [&](const std::string& what) {
      throw ModelMismatch(
          fmt::format("the checkpoint is not written: {} between rank 0 and rank {}. A rank has taken a step alone, or "
                      "has written to the parameter outside the optimizer. If ranks keep different values on purpose, "
                      "set check_parameters of CheckpointOptions to false",
                      what, r),
          {.rank = static_cast<int>(r), .call = "Checkpoint"});
    };
    if (checksums[r].size() != checksums[0].size()) fail("the number of parameters differs");
    for (std::size_t i = 0; i < names.size(); ++i) {
      const std::size_t at = (i + 1) * kChecksumBytes;
      if (checksums[r].compare(at, kChecksumBytes, checksums[0], at, kChecksumBytes) != 0)
        fail(fmt::format("the values of parameter {} differ", names[i]));
    }
  }
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
  std::string own = checksum_of(module.buffers());
  std::vector<std::string> names;
  if (check_parameters && group.world_size() > 1) {
    for (const auto& parameter : module.named_parameters()) {
      names.push_back(parameter.key());
      own += checksum_of({parameter.value()});
    }
  }
  const auto checksums = group.all_gather_bytes(own);
  check_same_parameters(checksums, names);
  const bool buffers_differ = std::any_of(checksums.begin(), checksums.end(), [&](const std::string& other) {
    return other.compare(0, kChecksumBytes, checksums[0], 0, kChecksumBytes) != 0;
  });
  std::string state;
  run_together(group, [&] { state = rank_state(module, parts, buffers_differ); });
  return group.all_gather_bytes(state);
}

RankState::RankState(const std::string& path, const std::string& bytes, torch::nn::Module& module,
                     const std::vector<CheckpointPart>& parts) {
  auto archive = std::make_shared<InputArchive>();
  archive->load_from(bytes.data(), bytes.size());
  std::size_t number = 0;
  for (at::Generator& generator : generators(device_of(module))) {
    at::Tensor state;
    // A run may have moved from a GPU to the CPU or back.
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
