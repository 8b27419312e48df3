#include <ddpkit/train/svg.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include <fmt/format.h>

namespace ddpkit::train::svg {
namespace {

/// Returns the length of the UTF-8 character at `at`; 0 if the bytes there are none.
std::size_t character_length(const std::string& text, std::size_t at) {
  const auto first = static_cast<unsigned char>(text[at]);
  const std::size_t length = first < 0x80                    ? 1
                             : first >= 0xC2 && first < 0xE0 ? 2
                             : (first & 0xF0) == 0xE0        ? 3
                             : first >= 0xF0 && first < 0xF5 ? 4
                                                             : 0;
  if (length == 0 || at + length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((static_cast<unsigned char>(text[at + i]) & 0xC0) != 0x80) return 0;
  }
  return length;
}

/// The values of an axis: from `low` to `high`, with a grid line every `step`.
struct Axis {
  double low = std::numeric_limits<double>::infinity();
  double high = -low;
  double step = 1;

  void include(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
  /// Moves the ends to grid lines, about `lines` of them.
  void round(double lines) {
    if (!(low <= high)) low = high = 0;
    const double span = high > low ? high - low : std::max(std::abs(high), 1.0) / 10;
    step = round_step(span / lines);
    low = step * std::floor(low / step);
    high = std::max(step * std::ceil(high / step), low + step);
  }
  double share(double value) const { return high > low ? (value - low) / (high - low) : 0; }
};

const char* colour(std::size_t series) {
  constexpr std::size_t kPairs = std::size(kColours) / 2;  // Neighbours are similar: every second one first.
  return kColours[(2 * (series % kPairs) + series / kPairs) % std::size(kColours)];
}

}  // namespace

std::string escaped(const std::string& text) {
  std::string result;
  for (std::size_t at = 0, length = 0; at < text.size(); at += std::max<std::size_t>(length, 1)) {
    const char c = text[at];
    length = character_length(text, at);
    if (length == 0 || (length == 1 && static_cast<unsigned char>(c) < 0x20))
      result += '?';
    else if (c == '&')
      result += "&amp;";
    else if (c == '<')
      result += "&lt;";
    else if (c == '>')
      result += "&gt;";
    else
      result.append(text, at, length);
  }
  return result;
}

std::string text_at(double x, double y, const std::string& anchor, const std::string& text, const std::string& more) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"{}>{}</text>\n", x, y, anchor, more,
                     escaped(text));
}

std::string line(double x1, double y1, double x2, double y2, const std::string& style) {
  return fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" {}/>\n", x1, y1, x2, y2, style);
}

double round_step(double value) {
  const double power = std::pow(10, std::floor(std::log10(value)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= value) return factor * power;
  }
  return 10 * power;
}

std::string chart(const Chart& chart, double left, double top, double width, double height) {
  constexpr double kLeft = 60, kRight = 20, kTop = 36, kBottom = 54, kLegendWidth = 150;
  Axis x, y;
  for (const Series& series : chart.series) {
    for (std::size_t i = 0; i < series.x.size(); ++i) {
      if (!std::isfinite(series.y[i])) continue;
      x.include(series.x[i]);
      y.include(series.y[i]);
    }
  }
  y.round(height / 60);
  const double first = left + kLeft, last = left + width - kRight, base = top + height - kBottom;
  const auto x_of = [&](double value) { return first + x.share(value) * (last - first); };
  const auto y_of = [&](double value) { return base - y.share(value) * (base - top - kTop); };
  std::string body = text_at((first + last) / 2, top + 22, "middle", chart.title, " class=\"title\"");
  for (double value = y.low; value <= y.high + y.step / 2; value += y.step) {
    body += line(first, y_of(value), last, y_of(value), "stroke=\"#e4e4e4\"");
    // A sum of steps may miss 0 by a rounding error.
    body += text_at(first - 6, y_of(value) + 4, "end",
                    fmt::format("{:.6g}", std::abs(value) < y.step / 2 ? 0.0 : value), " class=\"tick\"");
  }
  std::vector<std::pair<double, std::string>> ticks = chart.x_ticks;
  if (ticks.empty() && x.low <= x.high) {
    const double step = std::max(round_step(std::max(x.high - x.low, 1.0) / (width / 80)), 1.0);
    for (double value = step * std::ceil(x.low / step); value <= x.high; value += step)
      ticks.emplace_back(value, fmt::format("{:.6g}", value));
  }
  for (const auto& [value, text] : ticks) {
    const double place = x_of(value);
    const char* anchor = chart.x_ticks.empty() ? "middle" : place <= first ? "start" : place >= last ? "end" : "middle";
    body += text_at(place, base + 16, anchor, text, " class=\"tick\"");
  }
  for (std::size_t i = 0; i < chart.series.size(); ++i) {
    const Series& series = chart.series[i];
    std::string points;
    for (std::size_t point = 0; point < series.x.size(); ++point) {
      if (std::isfinite(series.y[point]))
        points += fmt::format("{:.1f},{:.1f} ", x_of(series.x[point]), y_of(series.y[point]));
    }
    // Square ends make a curve of one point visible.
    body += fmt::format(
        "<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"2\" stroke-linecap=\"square\" points=\"{}\"/>\n",
        colour(i), points);
    const double place = first + static_cast<double>(i) * kLegendWidth, below = top + height - 14;
    body += line(place, below, place + 20, below, fmt::format("stroke=\"{}\" stroke-width=\"2\"", colour(i)));
    body += text_at(place + 26, below + 4, "start", series.name);
  }
  return body;
}

std::string document(double width, double height, const std::string& body) {
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" "
             "font-family=\"sans-serif\" font-size=\"12\">\n"
             "<style>.title {{ font-size: 15px; font-weight: bold }} .tick {{ font-size: 10px }}</style>\n"
             "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
             width, height) +
         body + "</svg>\n";
}

}  // namespace ddpkit::train::svg
