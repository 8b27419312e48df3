#include "ratios.h"

#include <cstdlib>
#include <fstream>

#include <fmt/format.h>

#include <ddpkit/error.h>

namespace ddpkit::bench {

void note_ratio(const std::string& name, double value) {
  const char* path = std::getenv("DDPKIT_BENCH_RATIOS");
  if (path == nullptr || *path == '\0') return;
  std::ofstream file(path, std::ios::app);
  if (!(file << fmt::format("{}\t{:.4f}\n", name, value)).flush())
    throw Error(fmt::format("cannot write {}, which DDPKIT_BENCH_RATIOS names", path));
}

}  // namespace ddpkit::bench
