// Tier 2: torch/optim/optimizer.h. Copies of an optimizer's state without archives of its tensors.
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <string>
#include <vector>

namespace ddpkit::optim {

/// Writes an optimizer without the tensors of its state, if it is AdamW, Adam or SGD, of torch::optim or fused.
/// LibTorch compiles one class per parameter when it reads its own archive. Writes others as their save() does.
void write_without_tensors(torch::optim::Optimizer& optimizer, torch::serialize::OutputArchive& archive);

/// Reads the archive of write_without_tensors(). The values of state_tensors() are then undefined. Throws
/// InvalidArgument, and changes nothing, for an archive with other parameters or groups.
void read_without_tensors(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive);

/// Allocates memory for the whole state, so that read_without_tensors() need not, if the optimizer is fused.
void prepare_state(torch::optim::Optimizer& optimizer);

/// Returns the file that save_to() would write.
std::string bytes_of(torch::serialize::OutputArchive& archive);

/// Returns the tensors that the archive lacks, in the order of the parameters.
std::vector<at::Tensor> state_tensors(torch::optim::Optimizer& optimizer);

}  // namespace ddpkit::optim
