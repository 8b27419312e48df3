#include "video/clip_loader.h"

#include <algorithm>
#include <system_error>

#include <fmt/format.h>

namespace video {

ClipLoader::ClipLoader(std::filesystem::path folder, const ClipLoaderOptions& options)
    : folder_(std::move(folder)), options_(options) {
  if (!options.cache_dir.empty()) cache_.emplace(options.cache_dir, options.cache_bytes, options.processes);
}

ClipLoader::Entry ClipLoader::entry(const std::string& video) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = entries_.find(video); found != entries_.end()) return found->second;
  }
  // Outside the lock: two threads may compute the same index, with the same result.
  const std::filesystem::path path = folder_ / video;
  Entry made{.index = index_video(path), .version = {}};
  std::error_code error;
  made.version = fmt::format("{} {}", std::filesystem::file_size(path, error),
                             std::filesystem::last_write_time(path, error).time_since_epoch().count());
  const std::lock_guard lock(mutex_);
  return entries_.emplace(video, made).first->second;
}

std::shared_ptr<const VideoIndex> ClipLoader::index(const std::string& video) { return entry(video).index; }

std::unique_ptr<VideoReader> ClipLoader::take_reader(const std::string& video, const Entry& entry) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(idle_.begin(), idle_.end(), [&](const auto& idle) { return idle.first == video; });
    if (found != idle_.end()) {
      auto reader = std::move(found->second);
      idle_.erase(found);
      return reader;
    }
  }
  return std::make_unique<VideoReader>(entry.index);
}

void ClipLoader::give_back(const std::string& video, std::unique_ptr<VideoReader> reader) {
  std::unique_ptr<VideoReader> closed;  // Outside the lock.
  const std::lock_guard lock(mutex_);
  idle_.emplace_front(video, std::move(reader));
  if (idle_.size() > static_cast<std::size_t>(options_.open_videos)) {
    closed = std::move(idle_.back().second);
    idle_.pop_back();
  }
}

void ClipLoader::load(const std::string& video, std::int64_t first, std::uint8_t* pixels) {
  const Entry about = entry(video);
  const auto bytes = static_cast<std::size_t>(clip_bytes());
  std::string key;
  if (cache_) {
    key = fmt::format("{}\n{}\n{}+{} {}x{}", std::filesystem::absolute(folder_ / video).string(), about.version, first,
                      options_.frames, options_.size.width, options_.size.height);
    if (cache_->read(key, pixels, bytes)) return;
  }
  auto reader = take_reader(video, about);
  reader->read(first, options_.frames, options_.size, pixels);
  give_back(video, std::move(reader));
  if (cache_) cache_->write(key, pixels, bytes);
}

}  // namespace video
