// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <filesystem>

namespace har {

struct GenerateOptions {
  int train = 360;         ///< Training windows.
  int test = 180;          ///< Test windows.
  int steps = 128;         ///< Samples per window, at 50 Hz.
  std::uint64_t seed = 0;  ///< The same seed gives the same files on each machine.
};

/// Writes a synthetic data set in the UCI-HAR layout: six activities with different gait, strength and posture, plus
/// noise. `folder` appears atomically; it must not exist, or be empty. Throws ddpkit::InvalidArgument, or ddpkit::Error
/// with the system's reason.
void generate_ucihar(const std::filesystem::path& folder, const GenerateOptions& options);

}  // namespace har
