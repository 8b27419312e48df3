// Tier 0: the standard library only.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace ddpkit::bench {

/// A group of bars, each with its name and height. All groups of a chart have the same names.
struct BarGroup {
  std::string name;
  std::vector<std::pair<std::string, double>> bars;
};

/// Returns an SVG document: a bar chart that starts at 0, with a legend and the height above each bar.
std::string draw_bars(const std::string& title, const std::string& y_label, const std::vector<BarGroup>& groups);

}  // namespace ddpkit::bench
