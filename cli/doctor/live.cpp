#include "live.h"

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/comm/environment.h>
#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>
#include <ddpkit/launch/launcher.h>

namespace ddpkit::cli {
namespace {

constexpr const char* kAnswer = "ddpkit doctor: ";
constexpr std::int64_t kLargeBytes = 16 << 20;

/// Returns the median microseconds of one all-reduce and checks its result. The median reduces the effect of other
/// load.
double time_all_reduce(const ProcessGroup& group, std::int64_t bytes, int calls) {
  const at::Tensor tensor = group.allocate({bytes / 4}, at::kFloat);
  tensor.fill_(group.rank() + 1.0);
  group.all_reduce(tensor);
  const double ranks = group.world_size(), sum = tensor.sum().item<double>() / static_cast<double>(bytes / 4);
  if (sum != ranks * (ranks + 1) / 2)
    throw Error(fmt::format("all_reduce of {} ranks gave {}, not {}", ranks, sum, ranks * (ranks + 1) / 2));
  tensor.zero_();
  group.barrier();
  constexpr int kTogether = 5;  // Calls per reading of the clock, so the cost of reading is negligible.
  std::vector<double> times;
  for (int i = 0; i < calls; i += kTogether) {
    const auto begin = std::chrono::steady_clock::now();
    for (int k = 0; k < kTogether; ++k) group.all_reduce(tensor);
    if (tensor.is_cuda()) tensor[0].item<float>();  // Waits for the GPU.
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] / kTogether;
}

}  // namespace

int run_doctor_rank(const std::string& backend) {
  at::set_num_threads(1);
  const ProcessGroup group = init_process_group({.backend = backend, .timeout = std::chrono::seconds(30)});
  const double small = time_all_reduce(group, 4096, 200), large = time_all_reduce(group, kLargeBytes, 50);
  if (group.rank() == 0) std::cout << fmt::format("{}{} {}", kAnswer, small, large) << std::endl;
  return 0;
}

Findings live_all_reduce(const std::string& backend, int ranks) {
  std::string output;
  const auto result = ddpkit::launch(
      {.command = {std::filesystem::read_symlink("/proc/self/exe").string(), "doctor", "--as-rank", backend},
       .ranks = ranks,
       .time_limit = std::chrono::seconds(60),
       .on_output = [&](int, const std::string& text) { output += text; }});
  const std::string title = fmt::format("{} rank{}, {}", ranks, ranks == 1 ? "" : "s", backend);
  double small = 0, large = 0;
  const std::size_t at = output.find(kAnswer);
  if (result.exit_code() == 0 && at != std::string::npos &&
      std::sscanf(output.c_str() + at + std::char_traits<char>::length(kAnswer), "%lf %lf", &small, &large) == 2) {
    const std::string speed =
        ranks == 1 ? "it works; a rank alone exchanges nothing"
                   : fmt::format("4 KiB in {:.1f} us, 16 MiB at {:.1f} GB/s", small, kLargeBytes / large / 1e3);
    return {{"all-reduce", Severity::kFine, fmt::format("{}: {}", title, speed)}};
  }
  std::string reason = result.timed_out       ? "it did not end within 60 s"
                       : result.first_failure ? result.first_failure->describe()
                                              : "no answer";
  if (const std::string words = output.substr(0, output.find('\n')); !words.empty()) reason += ": " + words;
  return {{"all-reduce", Severity::kProblem, fmt::format("{}: {}", title, reason),
           fmt::format("Find out why {} ranks cannot all-reduce with {}: ddpkit run -n {} PROGRAM prints more.", ranks,
                       backend, ranks)}};
}

}  // namespace ddpkit::cli
