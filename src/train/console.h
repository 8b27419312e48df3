// The texts of a run's first and last lines.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace ddpkit::train {

/// Returns "05:07", or "1:05:07" from an hour on.
std::string time_text(double seconds);

/// Returns "318 MB", or "5.0 GB" from 1000 MB on.
std::string memory_text(std::int64_t bytes);

/// Returns "95.6k" or "3.06M"; below 1000 the number itself.
std::string count_text(std::int64_t count);

/// Returns "1 epoch" or "30 epochs". `name` is in the singular.
std::string number_of(std::int64_t count, const std::string& name);

/// Returns "GPU", "rank" or "replica": the word for each of the devices of this process.
const char* device_word(const std::vector<c10::Device>& devices);

/// Returns "GPU 0 318 MB, GPU 1 316 MB". `word`: see device_word(). [device]
std::string memory_of_each(const std::vector<std::int64_t>& bytes, std::string_view word);

/// Returns "runs/1/{best.pt, checkpoint.pt, logs/}": the files of a run folder, without temporary ones.
std::string files_of(const std::filesystem::path& folder);

}  // namespace ddpkit::train
