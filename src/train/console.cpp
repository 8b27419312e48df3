#include "train/console.h"

#include <algorithm>
#include <system_error>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace ddpkit::train {

std::string time_text(double seconds) {
  const auto all = static_cast<std::int64_t>(std::clamp(seconds, 0.0, 1e9));
  if (all < 3600) return fmt::format("{:02}:{:02}", all / 60, all % 60);
  return fmt::format("{}:{:02}:{:02}", all / 3600, all / 60 % 60, all % 60);
}

std::string memory_text(std::int64_t bytes) {
  const double megabytes = static_cast<double>(bytes) / 1e6;
  return megabytes < 1000 ? fmt::format("{:.0f} MB", megabytes) : fmt::format("{:.1f} GB", megabytes / 1000);
}

std::string count_text(std::int64_t count) {
  const auto number = static_cast<double>(count);
  return count < 1000        ? fmt::format("{}", count)
         : count < 1'000'000 ? fmt::format("{:.1f}k", number / 1e3)
                             : fmt::format("{:.2f}M", number / 1e6);
}

std::string number_of(std::int64_t count, const std::string& name) {
  return fmt::format("{} {}{}", count, name, count == 1 ? "" : "s");
}

const char* device_word(const std::vector<c10::Device>& devices) {
  return !devices.front().is_cpu() ? "GPU" : devices.size() > 1 ? "replica" : "rank";
}

std::string memory_of_each(const std::vector<std::int64_t>& bytes, std::string_view word) {
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < bytes.size(); ++i)
    parts.push_back(fmt::format("{} {} {}", word, i, memory_text(bytes[i])));
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string files_of(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (auto entry = std::filesystem::directory_iterator(folder, error); !error && entry != decltype(entry)();
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with(".") || name.ends_with(".tmp")) continue;
    names.push_back(entry->is_directory(error) ? name + "/" : name);
  }
  std::sort(names.begin(), names.end());
  return fmt::format("{}/{{{}}}", folder.string(), fmt::join(names, ", "));
}

}  // namespace ddpkit::train
