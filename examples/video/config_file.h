// Tier 0 and nlohmann-json.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>

#include "video/options.h"

namespace video {

/// Returns the options that identify a run, by their long names with '_' instead of '-'.
nlohmann::json run_config(const TrainOptions& options);

/// Writes a YAML file for --config that starts the same run again. The file appears atomically. Throws ddpkit::Error
/// with the system's reason.
void write_config_file(const std::filesystem::path& path, const TrainOptions& options);

}  // namespace video
