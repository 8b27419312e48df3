// Tier 0: the standard library only.
#pragma once

#include <array>
#include <filesystem>

#include "har/recordings.h"

namespace har {

/// The nine signals of the UCI-HAR layout, in the order of the channels: the files are
/// SPLIT/Inertial Signals/SIGNAL_SPLIT.txt.
inline constexpr std::array<const char*, 9> kUciSignals = {
    "body_acc_x",  "body_acc_y",  "body_acc_z",  "body_gyro_x", "body_gyro_y",
    "body_gyro_z", "total_acc_x", "total_acc_y", "total_acc_z",
};

/// Returns whether the contents of `folder` have the UCI-HAR layout.
bool is_ucihar(const std::filesystem::path& folder);

/// Reads the folder layout of "Human Activity Recognition Using Smartphones" (UCI): one window per line in each signal
/// file and its class (from 1) in y_SPLIT.txt. Optional files: the subjects in subject_SPLIT.txt and the class names in
/// activity_labels.txt. Throws ddpkit::InvalidArgument with file and line for missing, malformed or contradictory
/// input.
RecordingSet read_ucihar(const std::filesystem::path& folder);

}  // namespace har
