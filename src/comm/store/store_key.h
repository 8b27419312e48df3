// Tier 0: the standard library only. The key of a run's store, and how the ranks get it.
#pragma once

#include <cstdint>
#include <string>

#include "comm/store/sha256.h"

namespace ddpkit::store {

/// The variable with the descriptor of a StorePass, set by the launcher.
inline constexpr const char* kKeyDescriptorVariable = "DDPKIT_KEY_FD";
/// The variable with the name of a key file.
inline constexpr const char* kKeyFileVariable = "DDPKIT_KEY_FILE";

/// What a rank needs to join the store of its launcher.
struct StorePass {
  Digest key{};
  std::string run;
  std::uint16_t port = 0;  ///< On the loopback interface; 0: MASTER_ADDR and MASTER_PORT.
};

/// Returns the key that the file's bytes give. Throws InvalidArgument if the file cannot be read, has fewer than 32
/// bytes or more than 4096, or if other users may access it.
Digest read_key_file(const std::string& file);

/// Returns the pass in a descriptor made by PassDescriptor. Throws InvalidArgument if the descriptor is another one,
/// for example because a program between launcher and rank has closed it.
StorePass read_pass(int descriptor);

/// A sealed memory file with a pass, for the ranks to inherit. Nobody can change it, and it has no name.
class PassDescriptor {
 public:
  /// Throws Error if the kernel provides no memory file.
  explicit PassDescriptor(const StorePass& pass);
  ~PassDescriptor();
  PassDescriptor(const PassDescriptor&) = delete;
  PassDescriptor& operator=(const PassDescriptor&) = delete;

  int get() const noexcept { return fd_; }

 private:
  int fd_ = -1;
};

}  // namespace ddpkit::store
