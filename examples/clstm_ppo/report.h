// Tier 0: the standard library only. nlohmann-json is only declared. The output of a run.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "clstm_ppo/performance.h"

namespace clstm_ppo {

/// Means over the episodes of all ranks.
struct EpisodeMetrics {
  std::int64_t episodes = 0;  ///< Number of episodes in the means.
  double total_return = 0;
  double sharpe = 0;
  double max_drawdown = 0;
  double reward = 0;  ///< Sum over an episode.
  double cost = 0;    ///< Trading costs as a share of the initial cash.
};

/// Means over the batches of all ranks.
struct UpdateMetrics {
  double policy_loss = 0;
  double value_loss = 0;
  double entropy = 0;
  double kl = 0;
  double clip_share = 0;
};

/// The policy's result on the held-out days, compared with portfolios without a policy.
struct TestResult {
  std::vector<std::string> dates = {};            ///< [day]
  std::vector<double> policy = {}, waiting = {};  ///< Values of the portfolios. `waiting` is buy-and-hold. [day]
  std::vector<double> best = {};                  ///< The best policy that knows the pattern; empty without. [day]
  double periods_per_year = 252;

  Performance policy_performance() const { return performance_of(policy, periods_per_year); }
  /// Share of the best return that knows the pattern.
  std::optional<double> share_of_best() const;
};

/// A finished round.
struct Round {
  std::int64_t round = 0;  ///< From 1.
  std::int64_t rounds = 0;
  std::int64_t episodes = 0;  ///< So far, over all ranks.
  EpisodeMetrics episode = {};
  UpdateMetrics update = {};
  std::optional<double> test_return = std::nullopt;  ///< Empty if this round had no evaluation.
};

/// Formats a round as JSON, as a line of text (`num_episodes`: of the whole run), or as scalars for Run::report().
nlohmann::ordered_json as_json(const Round& round);
std::string as_line(const Round& round, std::int64_t num_episodes);
std::vector<std::pair<std::string, double>> scalars_of(const Round& round);
std::string as_json(const TestResult& test);
std::string as_table(const TestResult& test);
/// Draws the equity curves as an SVG document.
std::string as_svg(const TestResult& test);

}  // namespace clstm_ppo
