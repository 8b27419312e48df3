// Tier 0 and nlohmann-json.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>

#include "video/options.h"

namespace video {

/// What makes a run this run, by the options' long names with '_' for '-'.
nlohmann::json run_config(const TrainOptions& options);

/// Writes a YAML file with which --config starts the same run again. It appears whole or not at all. Throws
/// ddpkit::Error with the system's reason.
void write_config_file(const std::filesystem::path& path, const TrainOptions& options);

}  // namespace video
