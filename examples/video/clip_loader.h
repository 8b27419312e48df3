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
  std::int64_t frames = 17;              ///< Per clip.
  int open_videos = 32;                  ///< Idle files that remain open with their decoders.
  std::filesystem::path cache_dir = {};  ///< Empty: no cache.
  std::int64_t cache_bytes = 0;          ///< Limit of the folder.
  int processes = 1;                     ///< Processes that write to the cache; each may write its part of the
                                         ///< remaining space.
};

/// Decodes clips. Thread-safe: each call uses one decoder exclusively, if possible one that has this video open.
class ClipLoader {
 public:
  /// Video names are relative to `folder`.
  ClipLoader(std::filesystem::path folder, const ClipLoaderOptions& options);

  /// Decodes frames first .. first + frames - 1 of `video` to `pixels` [frames, height, width]. Throws
  /// ddpkit::InvalidArgument "PATH: what is wrong".
  void load(const std::string& video, std::int64_t first, std::uint8_t* pixels);

  /// Created at the first call for each video. Throws ddpkit::InvalidArgument.
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
  std::list<std::pair<std::string, std::unique_ptr<VideoReader>>> idle_;  ///< Most recently used first.
};

}  // namespace video
