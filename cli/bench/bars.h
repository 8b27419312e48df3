// Tier 0: the standard library only.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace ddpkit::bench {

/// Bars that stand together, each with its name and height. Names are the same in all groups of a drawing.
struct BarGroup {
  std::string name;
  std::vector<std::pair<std::string, double>> bars;
};

/// An SVG document: a bar chart from 0, with a legend and each bar's height above it.
std::string draw_bars(const std::string& title, const std::string& y_label, const std::vector<BarGroup>& groups);

}  // namespace ddpkit::bench
