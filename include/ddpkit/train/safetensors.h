// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <filesystem>

#include <ddpkit/train/state_dict.h>

namespace ddpkit::train {

/// Writes a safetensors file (huggingface.co/docs/safetensors), atomically. Tensors are stored contiguously by name,
/// ordered by element size (largest first) and then by name, and aligned to their type. Tensors that share memory are
/// each written in full. Throws InvalidArgument for a value that is not a dense tensor, a key that is not a str, or a
/// type that the format does not support. Throws Error with the system's reason if the file cannot be written.
void save_safetensors(const std::filesystem::path& path, const StateDict& tensors);

/// Reads a safetensors file to the CPU, in the order of its header. Throws InvalidArgument, in one sentence with the
/// file's name, if the file is missing, truncated, or has an invalid header: not JSON, longer than 100 MB, an unknown
/// type, a shape that does not match its bytes, bytes that belong to two tensors or to none. Like the reference
/// implementation, it accepts other fields in the entry of a tensor. LibTorch has no types for F6_E2M3 and F6_E3M2.
StateDict load_safetensors(const std::filesystem::path& path);

}  // namespace ddpkit::train
