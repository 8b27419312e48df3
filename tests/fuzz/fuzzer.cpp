// libFuzzer's entry point. The environment names one target of targets.h. script/fuzz builds and runs it.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "support/folder.h"
#include "targets.h"

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t bytes) {
  static const ddpkit::testing::FuzzTarget* const target = [] {
    const char* name = std::getenv("DDPKIT_FUZZ_TARGET");
    for (const auto& candidate : ddpkit::testing::fuzz_targets()) {
      if (name && std::string(name) == candidate.name) return &candidate;
    }
    std::fprintf(stderr, "DDPKIT_FUZZ_TARGET is none of:");
    for (const auto& candidate : ddpkit::testing::fuzz_targets()) std::fprintf(stderr, " %s", candidate.name);
    std::fprintf(stderr, "\n");
    std::_Exit(2);
  }();
  static const ddpkit::testing::Folder folder;
  ddpkit::testing::run_fuzz_target(*target, std::string(reinterpret_cast<const char*>(data), bytes), folder.path());
  return 0;
}
