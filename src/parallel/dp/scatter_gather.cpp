#include "parallel/dp/scatter_gather.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include <ddpkit/error.h>

namespace ddpkit {
namespace {

bool has_samples(const at::Tensor& tensor) { return tensor.defined() && tensor.dim() > 0; }

}  // namespace

std::int64_t batch_size(const std::vector<at::Tensor>& tensors) {
  std::int64_t samples = -1;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!has_samples(tensors[i])) continue;
    if (samples < 0) samples = tensors[i].size(0);
    if (tensors[i].size(0) != samples)
      throw InvalidArgument(fmt::format(
          "DataParallel cuts tensors along dim 0, and they are of different sizes there: {} samples in the first, but "
          "tensor {} is [{}]. Put the batch first in all of them, or give those that are none of it another way",
          samples, i, fmt::join(tensors[i].sizes(), ", ")));
  }
  return samples;
}

ChunkOffsets chunk(std::int64_t samples, int parts) {
  const std::int64_t count = std::clamp<std::int64_t>(samples, 1, parts);
  ChunkOffsets offsets = {0};
  for (std::int64_t i = 0; i < count; ++i)
    offsets.push_back(offsets.back() + samples / count + (i < samples % count ? 1 : 0));
  return offsets;
}

std::vector<at::Tensor> scatter(const std::vector<at::Tensor>& tensors, const ChunkOffsets& offsets, std::size_t index,
                                bool gradients, c10::Device device) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) {
      parts.emplace_back();
      continue;
    }
    at::Tensor part = tensor.detach();
    if (has_samples(tensor) && offsets.size() > 2)
      part = part.narrow(0, offsets[index], offsets[index + 1] - offsets[index]);
    if (!device.is_cpu()) part = part.to(device, /*non_blocking=*/true);
    if (gradients && tensor.requires_grad()) part.requires_grad_(true);
    parts.push_back(part);
  }
  return parts;
}

std::vector<at::Tensor> gather(const std::vector<std::vector<at::Tensor>>& outputs, bool stack) {
  const at::NoGradGuard no_grad;
  for (std::size_t r = 1; r < outputs.size(); ++r) {
    if (outputs[r].size() != outputs[0].size())
      throw Error(fmt::format(
          "DataParallel joins the replicas' outputs tensor by tensor: replica 0 has returned {} tensors, replica {} {}",
          outputs[0].size(), r, outputs[r].size()));
  }
  std::vector<at::Tensor> all;
  for (std::size_t i = 0; i < outputs[0].size(); ++i) {
    std::vector<at::Tensor> parts;
    for (std::size_t r = 0; r < outputs.size(); ++r) {
      const at::Tensor& part = outputs[r][i];
      if (part.defined() != outputs[0][i].defined() || (part.defined() && part.dim() != outputs[0][i].dim()))
        throw Error(
            fmt::format("DataParallel: output tensor {} has not as many dimensions from replica {} as from "
                        "replica 0, or is undefined in one of them: it cannot be joined",
                        i, r));
      if (part.defined()) parts.push_back(part.detach().to(outputs[0][i].device()));
    }
    if (parts.empty()) {
      all.emplace_back();
    } else if (parts[0].dim() == 0 && stack) {
      all.push_back(at::stack(parts));
    } else {
      all.push_back(parts.size() == 1 ? parts[0] : at::cat(parts));
    }
  }
  return all;
}

at::Tensor gradient_part(const at::Tensor& gradient, const std::vector<std::vector<at::Tensor>>& outputs,
                         std::size_t output, std::size_t part) {
  const at::Tensor& mine = outputs[part][output];
  if (mine.dim() == 0) return gradient.dim() == 0 ? gradient : gradient[static_cast<std::int64_t>(part)];
  std::int64_t begin = 0;
  for (std::size_t r = 0; r < part; ++r) begin += outputs[r][output].size(0);
  return gradient.narrow(0, begin, mine.size(0));
}

}  // namespace ddpkit
