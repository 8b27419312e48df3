// A program that fails as its arguments specify, for train_main_test.cpp.
#include <c10/util/Exception.h>

#include <ATen/ops/zeros.h>
#include <signal.h>

#include <cstdint>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>

#include <ddpkit/train/atomic_file.h>
#include <ddpkit/train/main.h>
#include <ddpkit/train/run_options.h>
#include <ddpkit/train/text.h>
#include <ddpkit/train/together.h>

int main(int argc, char** argv) {
  ddpkit::train::Options app("failing", "Fails.");
  std::string how;
  int at_rank = -1;
  std::string file;
  app.add("how", &how, "Kind of failure");
  app.add("at_rank", &at_rank, "-1: all");
  app.add("file", &file, "File to write");
  ddpkit::train::RunOptions run;
  run.batch_size = 2048;
  ddpkit::train::declare(app, run);
  return ddpkit::train::run_main(app, argc, argv, [&](ddpkit::train::Program& program) {
    if (how == "usage") throw ddpkit::train::UsageError("a wrong option");
    if (how == "early") throw ddpkit::InvalidArgument("before the rendezvous");
    if (how == "prints") {
      std::FILE* output = file.empty() ? nullptr : std::fopen(file.c_str(), "w");
      for (int i = 0; i < 3; ++i) ddpkit::train::print_line("a line");
      ddpkit::train::log_line("a remark");
      if (output) {
        std::fputs("data", output);
        std::fclose(output);
      }
      return;
    }
    if (how == "writes") {
      ddpkit::train::AtomicFile output(file);
      output.write(std::string(1 << 20, 'x').data(), 1 << 20);
      output.commit();
      return;
    }
    const auto group = program.init_process_group({.device = at::kCPU});
    const bool ours = at_rank < 0 || at_rank == group.rank();
    if (how == "together") {
      ddpkit::train::run_together(group, [&] {
        if (ours) throw ddpkit::InvalidArgument("a bad\nfile");
      });
    }
    if (ours && how == "alone") throw ddpkit::InvalidArgument("a fault of one rank");
    if (ours && how == "torch") TORCH_CHECK(false, "torch does not like this");
    if (ours && how == "gpu-memory")
      TORCH_CHECK_WITH(
          OutOfMemoryError, false,
          "CUDA out of memory. Tried to allocate 4.25 GiB. GPU 2 has a total capacity of 79.25 GiB of which "
          "1.10 GiB is free. Including non-PyTorch memory, this process has 78 GiB memory in use.");
    if (ours && how == "cpu-memory") (void)at::zeros({std::int64_t{1} << 45});
    if (ours && how == "memory") throw std::bad_alloc();
    if (ours && how == "out-of-range") (void)std::string().at(3);
    if (ours && how == "killed") raise(SIGKILL);
    if (ours && how == "unknown") throw 42;
    if (how == "mismatch") group.all_reduce(at::zeros({ours ? 3 : 4}));
    group.barrier();
  });
}
