#include "asr/faults.h"

#include <cstdio>
#include <nlohmann/json.hpp>
#include <numeric>

#include <fmt/format.h>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>
#include <ddpkit/train/json_text.h>

namespace asr {

const char* name_of(Fault fault) {
  switch (fault) {
    case Fault::kUnreadable:
      return "unreadable";
    case Fault::kEmptyTranscript:
      return "empty transcript";
    case Fault::kUnknownCharacter:
      return "unknown character";
    case Fault::kTooShort:
      return "target longer than its frames";
    case Fault::kNanLoss:
      break;
  }
  return "NaN loss";
}

void Faults::add(Fault fault, const std::string& file, const std::string& message) {
  if (policy_ == FaultPolicy::kStop)
    throw ddpkit::InvalidArgument(message + " (data.on_bad_data=skip skips such files)");
  const std::lock_guard lock(mutex_);
  if (!files_[static_cast<std::size_t>(fault)].insert(file).second) return;
  const std::string line = fmt::format("asr: skipped: {}\n", message);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

std::array<std::size_t, kFaults> Faults::count(const ddpkit::ProcessGroup& group) const {
  std::array<std::set<std::string>, kFaults> mine, all;
  {
    const std::lock_guard lock(mutex_);
    mine = files_;
  }
  for (const std::string& text : group.all_gather_bytes(ddpkit::train::json_text(nlohmann::json(mine)))) {
    const auto theirs = nlohmann::json::parse(text);
    for (std::size_t i = 0; i < kFaults; ++i) {
      for (const auto& file : theirs[i]) all[i].insert(file.get<std::string>());
    }
  }
  std::array<std::size_t, kFaults> counts{};
  for (std::size_t i = 0; i < kFaults; ++i) counts[i] = all[i].size();
  return counts;
}

std::string describe(const std::array<std::size_t, kFaults>& counts) {
  const std::size_t sum = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  if (sum == 0) return "no file skipped";
  std::string kinds;
  for (std::size_t i = 0; i < kFaults; ++i) {
    if (counts[i] > 0)
      kinds += fmt::format("{}{} {}", kinds.empty() ? "" : ", ", counts[i], name_of(static_cast<Fault>(i)));
  }
  return fmt::format("{} file{} skipped: {}", sum, sum == 1 ? "" : "s", kinds);
}

}  // namespace asr
