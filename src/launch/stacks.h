// Tier 0: the standard library only. The activity and the stacks of running ranks.
#pragma once

#include <vector>

#include <ddpkit/launch/launch_options.h>

#include "comm/trace/flight_view.h"
#include "launch/rank_process.h"

namespace ddpkit::launcher {

/// Asks the ranks for their stacks, and waits up to half a second. `ranks`: local ranks. `views`, `processes`: [rank].
std::vector<HungRank> look_at(const std::vector<int>& ranks, std::vector<FlightView>& views,
                              const std::vector<RankProcess>& processes);

}  // namespace ddpkit::launcher
