// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <filesystem>

#include <ddpkit/train/state_dict.h>

namespace ddpkit::train {

/// Writes a safetensors file (huggingface.co/docs/safetensors), whole or not at all: tensors by name, contiguous, the
/// largest elements first and then by name, on the boundaries of their type. What shares memory is written once each.
/// Throws InvalidArgument for a value that is no dense tensor, a key that is no str, or a type that the format lacks;
/// Error with the system's reason when the file cannot be written.
void save_safetensors(const std::filesystem::path& path, const StateDict& tensors);

/// Reads a safetensors file to the CPU, in the order of its header. Throws InvalidArgument, in one sentence with the
/// file's name, when it is missing, truncated, or its header is not what the format asks for: no JSON, longer than 100
/// MB, an unknown type, a shape that does not fill its bytes, bytes of two tensors or of none. Like the reference
/// implementation, it accepts other fields in the entry of a tensor. F6_E2M3 and F6_E3M2 have no type in LibTorch.
StateDict load_safetensors(const std::filesystem::path& path);

}  // namespace ddpkit::train
