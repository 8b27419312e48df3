#include "published.h"

#include <fmt/format.h>

#include <ddpkit/scaling/estimate.h>
#include <ddpkit/scaling/nccl.h>

namespace ddpkit::cli {
namespace {

using namespace scaling;

constexpr double kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB;

/// Triton-distributed issue 57 (torch.distributed, 1 KB to 16 MB) and nccl-tests issues 212 and 290 (1 GB).
void add_h100_all_reduce(std::vector<PublishedPoint>& points) {
  struct Measured {
    const char* what;
    double bytes, us;
  };
  static constexpr Measured kCurve[] = {
      {"1 KiB", kKiB, 19.3},     {"64 KiB", 64 * kKiB, 23.1}, {"256 KiB", 256 * kKiB, 24.8}, {"1 MiB", kMiB, 32.4},
      {"4 MiB", 4 * kMiB, 59.4}, {"8 MiB", 8 * kMiB, 90.5},   {"16 MiB", 16 * kMiB, 135.7},  {"1 GiB", kGiB, 3956},
  };
  const AllReduceModel model = nccl(gpu_cluster("h100"));
  for (const Measured& point : kCurve)
    points.push_back({"all-reduce, 8 x H100", point.what, "us", point.us, model(point.bytes, 8).us});
}

/// pytorch/benchmarks/distributed/ddp/README.md: seconds per step, batch 32, 25 MB buckets. The input of the model is
/// the step on one GPU under DistributedDataParallel.
void add_v100_ddp(std::vector<PublishedPoint>& points) {
  struct Measured {
    const char* model;
    double parameters, one, eight, sixteen;
  };
  static constexpr Measured kTable[] = {
      {"resnet50", 25.557e6, .100, .104, .104},
      {"resnet101", 44.549e6, .171, .179, .179},
      {"resnext50", 25.029e6, .147, .157, .157},
      {"resnext101", 88.791e6, .425, .447, .450},
  };
  const GpuCluster& cluster = gpu_cluster("v100");
  for (const Measured& row : kTable) {
    const StepProfile profile = assume_step({.compute_us = row.one * 1e6, .parameter_bytes = 4 * row.parameters});
    for (const auto& [gpus, seconds] : {std::pair(8, row.eight), std::pair(16, row.sixteen)}) {
      const StepPrediction step = predict_step(profile, nccl(cluster), gpus, {.contention = contention(cluster)});
      points.push_back(
          {"PyTorch's DDP, V100", fmt::format("{}, {} GPUs", row.model, gpus), "ms", seconds * 1e3, step.us / 1e3});
    }
  }
}

/// The Ultra-Scale Playbook of nanotron (dp_scaling.html): tokens per second and GPU. Assumptions for unpublished
/// values: a global batch of 1 M tokens for any number of GPUs, so each GPU accumulates 256 / GPUs sequences of 4,096
/// tokens; 1.2 G parameters; and 110 ms per step that are not overlapped, fitted to the points from 16 to 128 GPUs. See
/// docs/scaling.md.
void add_nanotron(std::vector<PublishedPoint>& points) {
  struct Measured {
    int gpus;
    double tokens;
  };
  static constexpr Measured kCurve[] = {{16, 37610}, {32, 35368}, {64, 31112}, {128, 26446}, {256, 15700}};
  constexpr double kSequence = 4096, kSequences = 256, kParameters = 1.2e9, kFixedUs = 110e3;
  constexpr double kStepOn8Us = kSequence * kSequences / 8 / 40150 * 1e6;
  constexpr double kSequenceUs = (kStepOn8Us - kFixedUs) / (kSequences / 8);
  const GpuCluster& cluster = gpu_cluster("h100");
  for (const Measured& point : kCurve) {
    const double sequences = kSequences / point.gpus;
    // Gradients are exchanged only in the backward of the last sequence.
    const StepProfile profile = assume_step({.compute_us = kSequenceUs,
                                             .other_us = (sequences - 1) * kSequenceUs + kFixedUs,
                                             .parameter_bytes = 4 * kParameters});
    const double us = predict_step(profile, nccl(cluster), point.gpus, {.contention = contention(cluster)}).us;
    points.push_back({"nanotron, pure DP, H100", fmt::format("{} GPUs", point.gpus), "tokens/s/GPU", point.tokens,
                      sequences * kSequence / us * 1e6});
  }
}

}  // namespace

std::vector<PublishedPoint> published_points() {
  std::vector<PublishedPoint> points;
  add_h100_all_reduce(points);
  add_v100_ddp(points);
  add_nanotron(points);
  return points;
}

}  // namespace ddpkit::cli
