// Tier 0 and FFmpeg's headers.
#pragma once

#include <filesystem>

#include "video/libav.h"

namespace video {

/// Opens a file and looks at its streams. Throws ddpkit::InvalidArgument "PATH: what is wrong".
AvInput open_video(const std::filesystem::path& path);

}  // namespace video
