#include "video/check.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include <fmt/format.h>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/data/prefetcher.h>
#include <ddpkit/error.h>
#include <ddpkit/train/json_text.h>
#include <ddpkit/train/metrics.h>
#include <ddpkit/train/progress.h>

namespace video {
namespace {

struct Finding {
  std::size_t trial = 0;
  std::string message;
  bool is_note = false;
};

std::vector<Finding> check_video(const TrialSet& set, const std::vector<std::size_t>& trials, ClipLoader& loader,
                                 Check depth) {
  std::vector<Finding> findings;
  const std::string& video = set.trials[trials.front()].video;
  std::shared_ptr<const VideoIndex> index;
  std::vector<std::uint8_t> pixels(static_cast<std::size_t>(loader.clip_bytes()));
  for (const std::size_t number : trials) {
    const Trial& trial = set.trials[number];
    try {
      if (!index) index = loader.index(video);
      if (trial.last >= index->frames())
        throw ddpkit::InvalidArgument(fmt::format("frames {} to {} of {} are asked for, but it has only {}",
                                                  trial.first, trial.last, video, index->frames()));
      if (depth == Check::kIndex) continue;
      // Decodes the middle clip first, because evaluation will need it; then the rest of a longer trial.
      const std::int64_t frames = loader.options().frames;
      std::set<std::int64_t> starts = {trial.first, trial.last + 1 - frames};
      for (std::int64_t start = trial.first; start + frames - 1 <= trial.last; start += frames) starts.insert(start);
      starts.insert(clip_start(trial, frames, 0.5));
      for (const std::int64_t start : starts) loader.load(video, start, pixels.data());
    } catch (const ddpkit::InvalidArgument& error) {
      findings.push_back({.trial = number, .message = error.what()});
    }
  }
  if (index && (index->width % 2 != 0 || index->height % 2 != 0))
    findings.push_back({.trial = trials.front(),
                        .message = fmt::format("{} has the odd dimensions {}x{}: scaled like all others", video,
                                               index->width, index->height),
                        .is_note = true});
  return findings;
}

}  // namespace

std::int64_t clip_start(const Trial& trial, std::int64_t clip_frames, double draw) {
  const std::int64_t places = trial.frames() - clip_frames + 1;
  return trial.first + std::min(static_cast<std::int64_t>(draw * static_cast<double>(places)), places - 1);
}

void check_trials(TrialSet& set, ClipLoader& loader, const CheckOptions& options, const ddpkit::ProcessGroup& group,
                  DataFaults& faults) {
  std::map<std::string, std::vector<std::size_t>> of_video;
  for (std::size_t i = 0; i < set.trials.size(); ++i) of_video[set.trials[i].video].push_back(i);
  std::vector<std::vector<std::size_t>> videos;
  for (auto& [name, trials] : of_video) videos.push_back(std::move(trials));

  const auto share =
      ddpkit::train::evaluation_share(static_cast<std::int64_t>(videos.size()), group.rank(), group.world_size());
  ddpkit::Prefetcher<std::vector<Finding>> checks(
      share.size(),
      [&](std::int64_t i) {
        return check_video(set, videos[static_cast<std::size_t>(share.begin + i)], loader, options.depth);
      },
      {.num_workers = options.num_workers});
  ddpkit::train::ProgressBar bar(share.size(), {.label = "checking videos", .enabled = group.rank() == 0});
  nlohmann::json mine = nlohmann::json::array();
  while (const auto findings = checks.next()) {
    for (const Finding& finding : *findings) mine.push_back({finding.trial, finding.message, finding.is_note});
    bar.advance();
  }
  bar.clear();

  std::map<std::size_t, std::string> bad;  // In the order of the file.
  for (const std::string& rank : group.all_gather_bytes(ddpkit::train::json_text(mine))) {
    for (const auto& finding : nlohmann::json::parse(rank)) {
      const std::size_t trial = finding[0];
      if (finding[2])
        faults.note(set.trials[trial].line, finding[1]);
      else
        bad.emplace(trial, finding[1]);
    }
  }
  for (const auto& [trial, message] : bad) faults.add(set.trials[trial].line, message);
  std::vector<Trial> good;
  for (std::size_t i = 0; i < set.trials.size(); ++i) {
    if (!bad.contains(i)) good.push_back(std::move(set.trials[i]));
  }
  set.trials = std::move(good);
  if (set.trials.empty())
    throw ddpkit::InvalidArgument(fmt::format("{} holds no trial to use", trials_file(set.folder).string()));
}

}  // namespace video
