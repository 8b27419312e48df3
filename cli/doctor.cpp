#include <ATen/Context.h>
#include <ATen/Version.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>

#include <fmt/format.h>

#include <ddpkit/comm/environment.h>
#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>

#include "commands.h"
#include "doctor/gpus.h"
#include "doctor/host.h"
#include "doctor/live.h"
#include "doctor/model.h"
#include "doctor/network.h"
#include "environment_number.h"

namespace ddpkit::cli {
namespace {

struct DoctorOptions {
  ModelPlan model;
  int ranks = 0;  ///< 0: one rank per GPU, or two ranks.
  std::string master_addr;
  int master_port = 0;
  bool json = false;
  std::string as_rank;  ///< Hidden option: this process is one rank of a live all-reduce.
};

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? std::optional<std::string>(value) : std::nullopt;
}

Findings examine_software() {
  Findings findings = {
      {"software", Severity::kFine, fmt::format("ddpkit {}, LibTorch {}", DDPKIT_VERSION, TORCH_VERSION)}};
  findings.push_back(
      {"software", Severity::kFine,
       at::hasCUDA() ? "LibTorch's CUDA is loaded" : "LibTorch's CPU libraries only, as this ddpkit is built"});
  findings.push_back({"software", Severity::kFine, fmt::format("vector instructions: {}", at::get_cpu_capability())});
  return findings;
}

void append(Findings& to, Findings more) {
  to.insert(to.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
}

int run_doctor(DoctorOptions options) {
  if (!options.as_rank.empty()) return run_doctor_rank(options.as_rank);
  const int usable = at::hasCUDA() ? static_cast<int>(at::detail::getCUDAHooks().deviceCount()) : 0;
  const int ranks = options.ranks > 0 ? options.ranks : usable > 0 ? usable : std::min(2, available_cores());
  const GpuSystem gpus = read_gpus();
  const HostLimits host = read_host_limits();
  Findings findings = examine_software();
  append(findings, examine_gpus(gpus, variable("CUDA_VISIBLE_DEVICES"), is_nccl_available(), usable));
  append(findings, examine_host(host, ranks, variable("OMP_NUM_THREADS"), usable > 0));
  if (options.master_addr.empty()) options.master_addr = variable("MASTER_ADDR").value_or("127.0.0.1");
  if (options.master_port == 0) options.master_port = number_from_environment("MASTER_PORT", 1, 65535, 29500);
  append(findings, examine_network(options.master_addr, options.master_port));
  append(findings, live_all_reduce("shm", std::max(2, usable > 0 ? 2 : ranks)));
  if (usable > 0) append(findings, live_all_reduce("nccl", usable));
  if (options.model.parameters > 0) {
    options.model.ranks = ranks;
    if (usable > 0 && !gpus.gpus.empty()) {
      const auto fullest = std::min_element(gpus.gpus.begin(), gpus.gpus.end(),
                                            [](const Gpu& a, const Gpu& b) { return a.free_bytes < b.free_bytes; });
      append(findings, examine_model(options.model, fullest->name, static_cast<double>(fullest->free_bytes), true));
    } else {
      append(findings,
             examine_model(options.model, "this host's memory", static_cast<double>(host.usable_memory()), false));
    }
  }
  std::cout << (options.json ? doctor_json(findings) + "\n" : doctor_report(findings));
  return can_train(findings) ? 0 : 1;
}

}  // namespace

void add_doctor(train::Options& app, Commands& commands) {
  train::Options& command = app.command("doctor", "Check this host for training: problems, speed and advice");
  command.epilog(
      "Checks the software, GPUs and their links, cores, memory, the container's limits and the rendezvous port, and\n"
      "runs an all-reduce. The exit code is 0 if training can start here, else 1.");
  auto shared = std::make_shared<DoctorOptions>();
  DoctorOptions& options = *shared;
  ModelPlan& model = options.model;
  add_parameter_count(command, "params", model.parameters, "Check whether a model of this size fits: 7.16M, 1.2G");
  command.add("optimizer", &model.optimizer, "sgd, momentum, adam or adamw")
      .one_of({"sgd", "momentum", "adam", "adamw"})
      .needs("params");
  command.add("amp", &model.amp, "In mixed precision").needs("params");
  command.add("sharded", &model.sharded, "With optim::ShardedOptimizer; on the CPU with its option shared_weights")
      .needs("params");
  command
      .add("fsdp_unit", &model.fsdp_unit,
           "With FullyShardedDataParallel: the largest unit's part of the parameters, such as 0.1")
      .between(0, 1)
      .excludes("sharded")
      .needs("params");
  command.add("batch_size", &model.batch, "Samples per device").between(1, 1 << 20).also("batch").needs("params");
  command.add("activation_mb", &model.activation_mb_per_sample, "MiB of activations per sample")
      .at_least(0)
      .needs("params");
  command
      .add("nproc_per_node", &options.ranks,
           "Ranks on this host: number of processes that run the all-reduce (default: one per GPU, or 2)")
      .between(1, 4096)
      .also("n")
      .also("ranks");
  command.add("master_addr", &options.master_addr, "Rendezvous address (default: MASTER_ADDR, or 127.0.0.1)");
  command.add("master_port", &options.master_port, "Rendezvous port (default: MASTER_PORT, or 29500)")
      .between(1, 65535);
  command.add("json", &options.json, "One JSON object instead of the report");
  command.add("as_rank", &options.as_rank, "").hidden();
  commands.emplace_back(&command, [shared] { return run_doctor(*shared); });
}

}  // namespace ddpkit::cli
