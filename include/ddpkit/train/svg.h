// Tier 0: the standard library only. Elements of SVG files.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace ddpkit::train::svg {

/// Colours of the series of a figure.
inline constexpr const char* kColours[] = {"#1f5fbf", "#6baed6", "#e6761b", "#2a9d4a", "#7f3fbf", "#b8860b"};

/// Returns `text` for use in XML. Bytes that are not UTF-8 become "?".
std::string escaped(const std::string& text);
/// Returns a text element at (x, y), in pixels. `anchor`: start, middle or end. `more`: further attributes.
std::string text_at(double x, double y, const std::string& anchor, const std::string& text,
                    const std::string& more = "");
/// Returns a line from (x1, y1) to (x2, y2), in pixels. `style`: attributes.
std::string line(double x1, double y1, double x2, double y2, const std::string& style);
/// Returns the smallest of 1, 2 and 5 times a power of 10 that is at least `value` (> 0): the step of an axis.
double round_step(double value);

/// A curve of a chart.
struct Series {
  std::string name;       ///< Text of the legend.
  std::vector<double> x;  ///< Increasing. [point]
  std::vector<double> y;  ///< Points that are not finite are skipped. [point]
};

/// A line chart with a grid and a legend.
struct Chart {
  std::string title;                                         ///< Text above the chart.
  std::vector<Series> series;                                ///< Curves, drawn in this order.
  std::vector<std::pair<double, std::string>> x_ticks = {};  ///< Values and their texts; empty: round numbers.
};

/// Returns a chart as elements in the rectangle at (left, top), in pixels.
std::string chart(const Chart& chart, double left, double top, double width, double height);

/// Returns the whole file. Text uses the classes "title" and "tick".
std::string document(double width, double height, const std::string& body);

}  // namespace ddpkit::train::svg
