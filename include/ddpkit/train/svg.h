// Tier 0: the standard library only. Elements of SVG files.
#pragma once

#include <string>

namespace ddpkit::train::svg {

/// Colours of the series of a figure.
inline constexpr const char* kColours[] = {"#1f5fbf", "#6baed6", "#e6761b", "#2a9d4a", "#7f3fbf", "#b8860b"};

/// Returns `text` for use in XML.
std::string escaped(const std::string& text);
/// Returns a text element at (x, y), in pixels. `anchor`: start, middle or end. `more`: further attributes.
std::string text_at(double x, double y, const std::string& anchor, const std::string& text,
                    const std::string& more = "");
/// Returns a line from (x1, y1) to (x2, y2), in pixels. `style`: attributes.
std::string line(double x1, double y1, double x2, double y2, const std::string& style);
/// Returns the smallest of 1, 2 and 5 times a power of 10 that is at least `value` (> 0): the step of an axis.
double round_step(double value);
/// Returns the whole file. Text uses the classes "title" and "tick".
std::string document(double width, double height, const std::string& body);

}  // namespace ddpkit::train::svg
