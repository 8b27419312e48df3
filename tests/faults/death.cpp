// A rank that ends in one of six ways, in a program without the trainers' main function.
#include <signal.h>
#include <sys/mman.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <thread>

#include <fmt/format.h>

#include <ddpkit/ddpkit.h>

namespace {

struct Arguments {
  std::string folder, way, backend;
  int victim = 0;
};

/// Slow static destructors, as in a large program.
struct SlowEnd {
  ~SlowEnd() {
    if (slow) std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
  bool slow = false;
} slow_end;

void mark(const Arguments& arguments, const std::string& name) {
  const double now = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  std::ofstream(arguments.folder + "/" + name) << fmt::format("{:.6f} {}\n", now, ::getpid()) << std::flush;
}

/// Acts as the kernel's OOM killer: the memory takes time to free.
void be_killed_for_memory() {
  constexpr std::size_t kBytes = std::size_t{64} << 20;
  void* memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory != MAP_FAILED) std::memset(memory, 1, kBytes);
  ::kill(::getpid(), SIGKILL);
}

/// Returns false if the rank must return 1.
bool train(const Arguments& arguments) {
  const ddpkit::ProcessGroup group = ddpkit::init_process_group({.backend = arguments.backend});
  const torch::Tensor tensor = torch::ones({1000});
  for (int step = 0;; ++step) {
    group.all_reduce(tensor);
    if (group.rank() != arguments.victim || step < 20) continue;
    mark(arguments, "fault");
    const std::string& way = arguments.way;
    slow_end.slow = true;
    if (way == "return") return false;
    if (way == "throw") throw std::runtime_error("thrown on purpose");
    if (way == "_exit") ::_exit(3);
    if (way == "signal") ::raise(SIGSEGV);
    if (way == "out-of-memory") be_killed_for_memory();
    if (way == "exit-0") std::exit(0);
    throw std::invalid_argument(way);
  }
}

}  // namespace

int main(int, char** argv) {
  const Arguments arguments{.folder = argv[1], .way = argv[2], .backend = argv[3], .victim = std::atoi(argv[4])};
  mark(arguments, fmt::format("pid-{}", ddpkit::read_launch_environment().rank));
  torch::set_num_threads(1);
  try {
    return train(arguments) ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
