// Tier 0 and FFmpeg's headers.
#pragma once

#include <filesystem>

#include "video/libav.h"

namespace video {

/// Opens a file and reads its stream information. Throws ddpkit::InvalidArgument "PATH: what is wrong".
AvInput open_video(const std::filesystem::path& path);

}  // namespace video
