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

/// Whether `folder` has the UCI-HAR layout, by what lies in it.
bool is_ucihar(const std::filesystem::path& folder);

/// Reads the folder layout of "Human Activity Recognition Using Smartphones" (UCI): a window a line in each signal
/// file, its class (from 1) in y_SPLIT.txt, and, where they exist, its subject in subject_SPLIT.txt and the classes'
/// names in activity_labels.txt. Throws ddpkit::InvalidArgument with file and line for whatever is missing, malformed
/// or contradicts another file.
RecordingSet read_ucihar(const std::filesystem::path& folder);

}  // namespace har
