// Tier 0: the standard library only.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "row.h"

namespace ddpkit::bench {

struct Curve {
  std::string name;
  std::vector<std::pair<double, double>> points;  ///< x, y. What is not above 0 has no place on the scales: left out.
  bool dashed = false;
};

/// One diagram of a plot, with scales of its own.
struct Panel {
  std::string title;
  std::vector<Curve> curves;
};

/// An SVG document: the panels in columns of two, both scales logarithmic, powers of 2 are marked on x. A panel without
/// points is left out.
std::string draw_log_log(const std::vector<Panel>& panels, const std::string& y_label,
                         const std::string& x_label = "bytes");

/// A panel for each collective and number of ranks, with a curve of bus bandwidth over bytes for each backend and kind
/// of memory; in the order of the rows.
std::vector<Panel> panels_of(const std::vector<Row>& rows);

}  // namespace ddpkit::bench
