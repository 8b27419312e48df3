// Tier 0: the standard library only.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <fstream>
#include <string>

namespace ddpkit {

/// Of the kernel that runs: the same in all its containers.
inline std::string boot_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot;
}

/// Tells this kernel's namespaces of one kind ("pid", "net", "time") apart; 0 where it has none.
inline std::uint64_t namespace_number(const char* kind) {
  struct stat space {};
  ::stat((std::string("/proc/self/ns/") + kind).c_str(), &space);
  return space.st_ino;
}

}  // namespace ddpkit
