// A small training run with a deliberate fault: one rank, the victim, executes --act at one step.
#include <signal.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <set>
#include <thread>

#include <fmt/format.h>

#include <ddpkit/ddpkit.h>
#include <ddpkit/train/checkpoint.h>
#include <ddpkit/train/main.h>

namespace {

struct Options {
  std::string act = "none";
  int victim = 1;
  int at_step = 20;
  int steps = 60;
  double timeout_seconds = 30;
  std::string backend = {};
  std::string folder = {};
  bool save = false;
  bool elastic = false;  ///< Continue without a lost rank.
  int until_ranks = 0;   ///< Train beyond `steps` until the group has this number of ranks.
};

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Records the time of an event, for the test.
void mark(const Options& options, const std::string& name, const std::string& text = "") {
  std::ofstream(options.folder + "/" + name) << fmt::format("{:.6f} {}\n", now_seconds(), text) << std::flush;
}

/// Lists the shared memory that this rank maps, one region per line: device, inode and name, as in /proc/PID/maps.
void note_memory(const Options& options, int rank) {
  std::ifstream maps("/proc/self/maps");
  std::set<std::string> regions;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/memfd:ddpkit:") == std::string::npos) continue;
    // ADDRESSES RIGHTS OFFSET DEVICE INODE NAME
    std::size_t at = 0;
    for (int field = 0; field < 3; ++field) at = line.find(' ', at) + 1;
    regions.insert(line.substr(at));
  }
  std::string text;
  for (const std::string& region : regions) text += region + "\n";
  std::ofstream(fmt::format("{}/memory-{}", options.folder, rank)) << text;
}

void die() { ::kill(::getpid(), SIGKILL); }

/// extern "C": the stack trace shows the plain name.
extern "C" __attribute__((noinline)) void stuck_on_purpose() {
  static volatile bool for_ever = true;
  while (for_ever) {
  }
}

void die_soon(const Options& options, std::chrono::microseconds after) {
  std::thread([&options, after] {
    std::this_thread::sleep_for(after);
    mark(options, "fault");
    die();
  }).detach();
}

/// A slow exit, as with static objects of a large program.
struct SlowEnd {
  bool slow = false;
  ~SlowEnd() {
    if (slow) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
} slow_end;

class Run {
 public:
  Run(const Options& options, ddpkit::ProcessGroup group)
      : options_(options), group_(std::move(group)), is_victim_(group_.rank() == options.victim) {}

  void train() {
    torch::manual_seed(7);
    const bool other_model = is_victim_ && options_.act == "other-model";
    const bool no_bias = is_victim_ && options_.act == "parameter-less";
    torch::nn::Sequential model(torch::nn::Linear(64, other_model ? 48 : 64), torch::nn::ReLU(),
                                torch::nn::Linear(torch::nn::LinearOptions(other_model ? 48 : 64, 8).bias(!no_bias)));
    if (other_model || no_bias) mark(options_, "fault");
    ddpkit::DistributedDataParallel ddp(model.ptr(), group_);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    ddpkit::DistributedSampler sampler(1000, group_);
    std::optional<ddpkit::optim::Elastic> elastic;
    if (options_.elastic) elastic.emplace(ddp, sampler, ddpkit::optim::ElasticOptions(), optimizer);
    int step = elastic ? static_cast<int>(elastic->steps()) : 0;
    do {  // A new rank takes the step at which it joins.
      ddpkit::set_step(step);
      if (step == options_.at_step) note_memory(options_, group_.rank());
      if (step == options_.at_step && !act()) return;
      if (is_victim_ && options_.act == "slow") std::this_thread::sleep_for(std::chrono::milliseconds(10));
      const auto update = [&] {
        optimizer.zero_grad();
        torch::Tensor input = torch::randn({32, 64});
        if (is_victim_ && step == options_.at_step && options_.act == "nan") {
          mark(options_, "fault");
          input.mul_(std::nan(""));
        }
        ddp(input).square().mean().backward();
        ddpkit::optim::clip_grad_norm_(model->parameters(), 1.0, 2.0, /*error_if_nonfinite=*/true);
        optimizer.step();
      };
      if (elastic) {
        while (!elastic->step(0, update)) {
        }
        if (elastic->interrupted()) mark(options_, fmt::format("continued-{}", group_.rank()));
      } else {
        update();
      }
      if (options_.save)
        ddpkit::train::save_checkpoint(options_.folder + "/checkpoint.pt", *model, optimizer, {.step = step}, group_);
    } while (++step < options_.steps || group_.world_size() < options_.until_ranks);
    if (group_.rank() == 0) fmt::print("done after {} steps\n", options_.steps);
  }

 private:
  /// Returns false if the rank must end early.
  bool act() {
    const std::string& what = options_.act;
    if (is_victim_ && what.starts_with("other-")) mark(options_, "fault");
    if (what == "split") {
      // Even and odd ranks: with two ranks per node, each part has one rank per node.
      for (const int first : {0, 1}) {
        const auto part = group_.split({first, first + 2});
        if (!part) continue;
        torch::Tensor sum = torch::full({1000}, group_.rank());
        part->all_reduce(sum);
        fmt::print("rank {} of a part with {} on its host: {}\n", group_.rank(), part->local_world_size(),
                   sum[999].item<std::int64_t>());
      }
    }
    if (what == "other-shape") group_.all_reduce(torch::ones({is_victim_ ? 3 : 4}));
    if (what == "other-dtype") group_.all_reduce(torch::ones({4}, is_victim_ ? torch::kDouble : torch::kFloat));
    if (what == "kill-in-all-reduce") {
      if (is_victim_) die_soon(options_, std::chrono::milliseconds(20));
      const torch::Tensor tensor = torch::ones({1 << 20});
      for (;;) group_.all_reduce(tensor);
    }
    if (!is_victim_) return true;
    if (what == "kill-in-save") die_soon(options_, std::chrono::microseconds(1500));
    if (what == "none" || what == "slow" || what == "nan" || what == "kill-in-save" || what == "kill-at-exit")
      return true;
    mark(options_, "fault");
    if (what == "kill") die();
    if (what == "abort") std::abort();
    if (what == "segfault") ::raise(SIGSEGV);
    slow_end.slow = what == "throw-slowly";
    if (what.starts_with("throw")) throw std::runtime_error("thrown on purpose");
    if (what == "stop") ::raise(SIGSTOP);
    if (what == "stuck") stuck_on_purpose();
    if (what == "extra") group_.barrier();
    if (what == "out-of-memory") {
      const rlimit limit{std::size_t{1} << 20, std::size_t{1} << 20};
      ::setrlimit(RLIMIT_AS, &limit);
      const torch::Tensor large = torch::ones({std::int64_t{1} << 34});
    }
    return what != "exit-early" && what != "return-slowly" && what != "leave";
  }

  const Options& options_;
  ddpkit::ProcessGroup group_;
  bool is_victim_;
};

}  // namespace

int main(int argc, char** argv) {
  ddpkit::train::Options app("worker", "Goes wrong on purpose.");
  Options options;
  app.add("act", &options.act, "");
  app.add("victim", &options.victim, "");
  app.add("at_step", &options.at_step, "");
  app.add("steps", &options.steps, "");
  app.add("timeout", &options.timeout_seconds, "");
  app.add("backend", &options.backend, "");
  app.add("folder", &options.folder, "").required();
  app.add("save", &options.save, "");
  app.add("elastic", &options.elastic, "");
  app.add("until_ranks", &options.until_ranks, "");
  const int status = ddpkit::train::run_main(app, argc, argv, [&](ddpkit::train::Program& program) {
    const int rank = ddpkit::read_launch_environment().rank;
    std::ofstream(fmt::format("{}/pid-{}", options.folder, rank)) << ::getpid() << std::flush;
    torch::set_num_threads(1);
    if (rank == options.victim && options.act == "kill-before-rendezvous") {
      mark(options, "fault");
      die();
    }
    if (rank == options.victim && options.act == "never-comes") stuck_on_purpose();
    try {
      const auto timeout = std::chrono::milliseconds(static_cast<int>(options.timeout_seconds * 1000));
      Run(options,
          program.init_process_group({.backend = options.backend, .timeout = timeout, .elastic = options.elastic}))
          .train();
    } catch (const std::exception& error) {
      mark(options, fmt::format("named-{}", rank), error.what());
      throw;
    }
  });
  const char* rank = std::getenv("RANK");
  if (!rank || std::atoi(rank) != options.victim) return status;
  if (options.act == "kill-at-exit") {
    mark(options, "fault");
    die();
  }
  if (options.act == "leave") stuck_on_purpose();
  slow_end.slow = slow_end.slow || options.act == "return-slowly";
  return options.act == "return-slowly" ? 1 : status;
}
