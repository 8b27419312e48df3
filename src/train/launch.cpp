#include <ddpkit/train/launch.h>

#include <torch/cuda.h>

#include <array>
#include <cstdio>
#include <filesystem>

#include <fmt/format.h>

#include <ddpkit/comm/environment.h>
#include <ddpkit/launch/launcher.h>
#include <ddpkit/parse_number.h>
#include <ddpkit/train/run_options.h>
#include <ddpkit/train/text.h>

namespace ddpkit::train {

void declare(Options& options, SelfLaunchOptions& launch) {
  options.section("distributed");
  options
      .add(
          "nproc_per_node", rank_count(launch.nproc_per_node), [&launch] { return launch.nproc_per_node; },
          "Ranks that this program starts on this host: N, gpu, cpu (cores), or auto")
      .also("spawn")
      .may_differ();
  options
      .add("num_gpus", &launch.num_gpus,
           "GPUs to use on this host, one per rank; this program starts the ranks; -1: all; 0: the CPU")
      .between(-1, 1024)
      .may_differ();
  options.add("nnodes", &launch.nnodes, "Number of hosts; the program is started once on each host")
      .between(1, 65536)
      .may_differ();
  options.add("node_rank", &launch.node_rank, "Index of this host").between(0, 65535).may_differ();
  options.add("master_addr", &launch.master_addr, "Address of host 0 for the rendezvous").may_differ();
  options.add("master_port", &launch.master_port, "Port of the rendezvous; 0: a free port, for one host")
      .between(0, 65535)
      .may_differ();
}

Options::Parse rank_count(std::string& ranks) {
  return [&ranks](const std::string& text) {
    int number = 0;
    const bool is_name = text.empty() || text == "gpu" || text == "cpu" || text == "auto";
    if (!is_name && !(parse_number(text, number) && number >= 1 && number <= 4096))
      return "a number from 1 to 4096, gpu, cpu or auto";
    ranks = text;
    return "";
  };
}

int count_ranks(const std::string& text, int gpus) {
  if (text == "cpu" || (text == "auto" && gpus == 0)) return available_cores();
  if (text == "gpu" && gpus == 0)
    throw InvalidArgument("gpu: no GPU is visible on this host; ddpkit doctor shows the reason");
  if (text == "gpu" || text == "auto") return gpus;
  int ranks = 0;
  parse_number(text, ranks);
  return ranks;
}

namespace {

bool is_on_cpu(const RunOptions& run) {
  return run.backend == "shm" || run.backend == "gloo" || run.backend == "hierarchical";
}

// Returns the lines of nvidia-smi -L: "GPU 0: NAME (UUID: ...)". Empty without the program.
std::string list_of_gpus() {
  std::string text;
  std::array<char, 256> part = {};
  std::FILE* output = popen("nvidia-smi -L 2>/dev/null", "r");
  if (!output) return text;
  while (std::fgets(part.data(), static_cast<int>(part.size()), output)) text += part.data();
  pclose(output);
  return text.empty() ? text : "Available GPUs:\n" + text;
}

void print_banner(int ranks, bool has_no_gpus) {
  const std::string line(42, '=');
  log_line(fmt::format("{0}\nMulti-GPU Training Launcher\n{0}\n{1}Launching distributed training...", line,
                       has_no_gpus ? fmt::format("Number of ranks: {} (CPU)\n", ranks)
                                   : fmt::format("Number of GPUs: {}\n{}", ranks, list_of_gpus())));
}

// Returns the number of ranks that `run` asks for; 0 if it starts none.
int ranks_to_start(const RunOptions& run, const LaunchEnvironment& environment) {
  const SelfLaunchOptions& launch = run.launch;
  const auto gpus = [] { return static_cast<int>(torch::cuda::device_count()); };
  if (!launch.nproc_per_node.empty()) return count_ranks(launch.nproc_per_node, gpus());
  if (launch.nnodes > 1) throw UsageError("--nnodes needs --nproc-per-node: the number of ranks on each host");
  if (!launch.num_gpus || is_on_cpu(run) || environment.launcher != "none") return 0;
  if (*launch.num_gpus > gpus())
    throw UsageError(fmt::format("--num-gpus {}: this host shows {}", *launch.num_gpus,
                                 gpus() == 0 ? "none" : fmt::format("{}", gpus())));
  const int ranks = *launch.num_gpus < 0 ? gpus() : *launch.num_gpus;
  return ranks > 1 ? ranks : 0;
}

}  // namespace

std::optional<int> launch_ranks(const RunOptions& run, const std::string& program, int argc, const char* const* argv) {
  const SelfLaunchOptions& launch = run.launch;
  const LaunchEnvironment environment = read_launch_environment();
  const int ranks = ranks_to_start(run, environment);
  if (ranks == 0) return std::nullopt;
  if (environment.launcher != "none") {
    if (environment.local_world_size == ranks) return std::nullopt;
    throw UsageError(fmt::format("--nproc-per-node asks for {} ranks, but the launcher started {} on this host", ranks,
                                 environment.local_world_size));
  }
  ddpkit::LaunchOptions local{.command = {std::filesystem::read_symlink("/proc/self/exe").string()},
                              .ranks = ranks,
                              .nodes = launch.nnodes,
                              .node_rank = launch.node_rank,
                              .master_addr = launch.master_addr,
                              .master_port = launch.master_port,
                              .min_ranks = run.elastic ? run.min_ranks : 0,
                              .max_replacements = run.elastic ? run.max_replacements : 0,
                              .forward_signals = true};
  print_banner(ranks, is_on_cpu(run) || torch::cuda::device_count() == 0);
  local.command.insert(local.command.end(), argv + 1, argv + argc);
  if (launch.nproc_per_node.empty()) local.command.push_back(fmt::format("--nproc-per-node={}", ranks));
  const LaunchResult result = ddpkit::launch(local);
  // A rank that exited with an error code has already reported the error.
  if (result.first_failure && (result.first_failure->signal != 0 || result.first_failure->exit_code == 0))
    log_line(fmt::format("{}: rank {} {}", program, result.first_failure->rank, result.first_failure->describe()));
  return result.exit_code();
}

}  // namespace ddpkit::train
