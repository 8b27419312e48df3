// Tier 0: the standard library only. A program that starts its ranks.
#pragma once

#include <optional>
#include <string>

#include <ddpkit/train/options.h>

namespace ddpkit::train {

struct RunOptions;

/// The ranks that a program starts. Names are torchrun's.
struct SelfLaunchOptions {
  std::string nproc_per_node = {};  ///< N, gpu, cpu or auto; empty: the program starts no ranks.
  /// If nproc_per_node is empty: one rank per GPU. -1: all GPUs of the host; N: N GPUs; 0: one rank on the CPU.
  std::optional<int> num_gpus = std::nullopt;
  int nnodes = 1;                         ///< Hosts of the job.
  int node_rank = 0;                      ///< Number of this host.
  std::string master_addr = "127.0.0.1";  ///< Address of host 0.
  int master_port = 0;                    ///< 0: a free port, for one host.
};

/// Declares --nproc-per-node (or --spawn), --num-gpus, --nnodes, --node-rank, --master-addr and --master-port.
void declare(Options& options, SelfLaunchOptions& launch);

/// Parses a number of ranks to start: 1 to 4096, gpu, cpu, or auto. `ranks` must outlive the parse.
Options::Parse rank_count(std::string& ranks);

/// Returns the number of ranks for such a text on a host with `gpus` GPUs. gpu: one per GPU. cpu: one per core that
/// this process may use. auto: gpu if there is a GPU, otherwise cpu. Throws InvalidArgument for gpu without a GPU.
int count_ranks(const std::string& text, int gpus);

/// If run.launch asks for ranks and no launcher has started this process, starts this program once per rank with the
/// same arguments, waits, and returns the exit code. Otherwise returns nothing. Throws UsageError under a launcher that
/// started another number of ranks.
std::optional<int> launch_ranks(const RunOptions& run, const std::string& program, int argc, const char* const* argv);

}  // namespace ddpkit::train
