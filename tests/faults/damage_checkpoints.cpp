#include <algorithm>
#include <random>

#include <fmt/format.h>

#include "faults/training.h"

namespace ddpkit::testing {
namespace {

/// Returns the seconds until the program rejected the checkpoint.
double check_refuses(const Folder& folder, const std::string& damaged, const std::vector<std::string>& options) {
  write_file(folder / "checkpoint.pt", damaged);
  FaultRun run(training(folder.path(), options, {}, 1));
  CHECK(run.wait() == 1);
  CHECK_THAT(run.err(), ContainsSubstring("checkpoint.pt"));
  CHECK(read_file(folder / "checkpoint.pt") == damaged);
  return run.seconds();
}

}  // namespace

void damage_checkpoints(int truncations, int flips) {
  const Folder folder;
  const std::vector<std::string> options = {"--epochs", "1", "--json"};
  FaultRun whole(training(folder.path(), options));
  REQUIRE(whole.wait() == 0);
  const std::string checkpoint = read_file(folder / "checkpoint.pt");
  double slowest = 0;
  for (int i = 0; i < truncations; ++i) {
    CAPTURE(i);
    const std::size_t kept = checkpoint.size() * static_cast<std::size_t>(i) / static_cast<std::size_t>(truncations);
    slowest = std::max(slowest, check_refuses(folder, checkpoint.substr(0, kept), options));
  }
  add_row(fmt::format("checkpoint truncated at {} points", truncations), "refused in one sentence, left as it is",
          slowest);
  std::mt19937 random(3);
  slowest = 0;
  for (int i = 0; i < flips; ++i) {
    const std::size_t at = random() % checkpoint.size();
    CAPTURE(at, checkpoint.size());
    std::string damaged = checkpoint;
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << random() % 8));
    slowest = std::max(slowest, check_refuses(folder, damaged, options));
  }
  add_row(fmt::format("a bit of the checkpoint flipped, {} times", flips), "refused in one sentence, left as it is",
          slowest);
}

}  // namespace ddpkit::testing
