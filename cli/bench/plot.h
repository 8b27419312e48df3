// Tier 0: the standard library only.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "row.h"

namespace ddpkit::bench {

struct Curve {
  std::string name;
  std::vector<std::pair<double, double>> points;  ///< x, y. Points with a value of 0 or less are skipped.
  bool dashed = false;
};

/// One diagram of a plot, with separate scales.
struct Panel {
  std::string title;
  std::vector<Curve> curves;
};

/// Returns an SVG document: the panels in two columns, with logarithmic scales and powers of 2 marked on x. Skips
/// panels without points.
std::string draw_log_log(const std::vector<Panel>& panels, const std::string& y_label,
                         const std::string& x_label = "bytes");

/// Returns one panel per collective and number of ranks, in the order of the rows. Each panel has one curve of bus
/// bandwidth over bytes per backend and kind of memory.
std::vector<Panel> panels_of(const std::vector<Row>& rows);

}  // namespace ddpkit::bench
