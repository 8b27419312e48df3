// Runs the pages' C++ fragments. The first argument is the required number of ranks.
#include "tests/docs/fragments.h"

namespace ddpkit::docs {

std::vector<const Fragment*>& Fragment::all() {
  static std::vector<const Fragment*> fragments;
  return fragments;
}

}  // namespace ddpkit::docs

int main(int argc, char** argv) {
  const char* where = "before the first";
  try {
    ddpkit::docs::require(argc == 2, "one argument, the number of ranks");
    const auto group = ddpkit::init_process_group();
    ddpkit::docs::require(std::to_string(group.world_size()) == argv[1], "as many ranks as " + std::string(argv[1]));
    ddpkit::docs::require(!ddpkit::docs::Fragment::all().empty(), "there are fragments");
    for (const ddpkit::docs::Fragment* fragment : ddpkit::docs::Fragment::all()) {
      where = fragment->where();
      if (group.rank() == 0) std::cout << where << std::endl;
      fragment->run(group);
      group.barrier();
    }
  } catch (const std::exception& error) {
    std::cerr << where << ": " << error.what() << '\n';
    return 1;
  }
}
