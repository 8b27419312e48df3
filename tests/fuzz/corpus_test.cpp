// The parsers read the fuzzers' initial inputs and all inputs that once showed a fault.
#include "support/catch.h"
#include "support/folder.h"
#include "targets.h"

using namespace ddpkit::testing;

TEST_CASE("every file of the fuzzers' corpus is read or refused", "[fuzz]") {
  for (const FuzzTarget& target : fuzz_targets()) {
    CAPTURE(target.name);
    int files = 0;
    for (const auto& entry :
         std::filesystem::directory_iterator(std::filesystem::path(DDPKIT_FUZZ_CORPUS) / target.name)) {
      CAPTURE(entry.path());
      const Folder folder;
      CHECK_NOTHROW(run_fuzz_target(target, read_file(entry.path()), folder.path()));
      ++files;
    }
    CHECK(files > 0);
  }
}
