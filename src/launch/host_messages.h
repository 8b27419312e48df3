// Tier 0: the standard library only. The values that the launchers of several hosts exchange.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/host_decisions.h"

namespace ddpkit::launcher {

/// A round, or the end of the run. From host 0.
struct RoundPlan {
  std::optional<int> exit_code = {};     ///< The run ends, with this code of all launchers.
  int port = 0;                          ///< For the store of the ranks, on host 0.
  std::vector<int> members = {};         ///< IDs of the launchers. [host]
  std::vector<std::string> report = {};  ///< What happened before. [line]
};

/// RoundEnd::blamed_rank: the failed rank lost no other rank, or a rank that its backend does not know.
inline constexpr int kNoRank = -1, kAnyRank = -2;

/// The first failure of a round.
struct RoundEnd {
  int id = 0;                 ///< The launcher whose rank failed, or that is lost.
  int blamed_rank = kNoRank;  ///< The rank of another host that the failed rank lost.
  std::string text = {};      ///< Empty if a rank failed: its report is in the result of its host.
};

std::string text_of(const RoundPlan& plan);
std::string text_of(const RoundEnd& end);
std::string text_of(const HostResult& result);
RoundPlan read_plan(const std::string& text);
RoundEnd read_end(const std::string& text);
HostResult read_result(const std::string& text);

}  // namespace ddpkit::launcher
