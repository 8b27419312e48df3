// Runs programs on several GPUs.
#pragma once

#include <cstdlib>
#include <string>
#include <vector>

#include <ATen/ops/allclose.h>

#include "cli/run_ddpkit.h"
#include "support/program.h"

namespace gpu {

/// Checks that c10d, NCCL, the linker and the virtual GPUs have printed nothing. These words mark their lines.
inline void check_quiet(const std::string& errors) {
  INFO(errors);
  for (const char* word : {"ProcessGroup", "NCCL", "c10d", "TCPStore", "frame #", "[W", "[E", "arning", "virtual GPU"})
    CHECK_THAT(errors, !ContainsSubstring(word));
}

inline ddpkit::testing::Run run_ranks(const ddpkit::testing::Folder& folder, int ranks, const std::string& program,
                                      const ddpkit::testing::Arguments& arguments) {
  auto run = ddpkit::testing::run_ddpkit(
      folder, ddpkit::testing::joined({"run", "-n", std::to_string(ranks), program}, arguments));
  INFO(run.errors);
  CHECK(run.exit_code == 0);
  check_quiet(run.errors);
  return run;
}

inline void check_close(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected) {
  REQUIRE(found.size() == expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    INFO("tensor " << i << " differs by " << (found[i].cpu() - expected[i].cpu()).abs().max());
    CHECK(at::allclose(found[i].cpu(), expected[i].cpu(), 1e-4, 2e-5));
  }
}

/// Sets an environment variable for the programs that start while this object exists.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) { ::setenv(name, value.c_str(), 1); }
  ~Variable() { ::unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
};

}  // namespace gpu
