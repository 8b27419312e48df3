// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "video/clip_cache.h"
#include "video/video_reader.h"

namespace video {

struct ClipLoaderOptions {
  FrameSize size = {256, 256};
  std::int64_t frames = 17;              ///< Of a clip.
  int open_videos = 32;                  ///< Files with their decoders that are kept open while nobody reads them.
  std::filesystem::path cache_dir = {};  ///< Empty: no cache.
  std::int64_t cache_bytes = 0;          ///< What the folder may hold.
  int processes = 1;                     ///< That write to it; each may take its part of what is left.
};

/// Decodes clips, in any number of threads: each call has a decoder to itself, one that has this video open if there
/// is one.
class ClipLoader {
 public:
  /// Videos are named relative to `folder`.
  ClipLoader(std::filesystem::path folder, const ClipLoaderOptions& options);

  /// Frames first .. first + frames - 1 of `video` to `pixels` [frames, height, width]. Throws
  /// ddpkit::InvalidArgument "PATH: what is wrong".
  void load(const std::string& video, std::int64_t first, std::uint8_t* pixels);

  /// Made at the first call for each video. Throws ddpkit::InvalidArgument.
  std::shared_ptr<const VideoIndex> index(const std::string& video);

  std::int64_t clip_bytes() const noexcept { return options_.frames * options_.size.pixels(); }
  const ClipLoaderOptions& options() const noexcept { return options_; }
  const std::optional<ClipCache>& cache() const noexcept { return cache_; }

 private:
  struct Entry {
    std::shared_ptr<const VideoIndex> index;
    std::string version;  ///< Size and time of the file.
  };

  Entry entry(const std::string& video);
  std::unique_ptr<VideoReader> take_reader(const std::string& video, const Entry& entry);
  void give_back(const std::string& video, std::unique_ptr<VideoReader> reader);

  std::filesystem::path folder_;
  ClipLoaderOptions options_;
  std::optional<ClipCache> cache_;
  std::mutex mutex_;
  std::map<std::string, Entry> entries_;
  std::list<std::pair<std::string, std::unique_ptr<VideoReader>>> idle_;  ///< The last used first.
};

}  // namespace video
