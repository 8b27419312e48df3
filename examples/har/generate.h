// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <filesystem>

namespace har {

struct GenerateOptions {
  int train = 360;         ///< Training windows.
  int test = 180;          ///< Test windows.
  int steps = 128;         ///< Samples a window, at 50 Hz.
  std::uint64_t seed = 0;  ///< The same files on every machine.
};

/// Writes a made-up data set in the UCI-HAR layout: six activities whose gait, strength and posture differ, with noise,
/// as no recording of anyone. `folder` appears whole or not at all; it must not exist, or be empty. Throws
/// ddpkit::InvalidArgument, or ddpkit::Error with the system's reason.
void generate_ucihar(const std::filesystem::path& folder, const GenerateOptions& options);

}  // namespace har
