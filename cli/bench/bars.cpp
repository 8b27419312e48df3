#include "bars.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include <ddpkit/train/svg.h>

namespace ddpkit::bench {
namespace svg = train::svg;

std::string draw_bars(const std::string& title, const std::string& y_label, const std::vector<BarGroup>& groups) {
  constexpr double kWidth = 640, kHeight = 420, kLeft = 70, kRight = 20, kTop = 50, kBottom = 70;
  double highest = 0;
  std::vector<std::string> names;
  for (const BarGroup& group : groups) {
    for (const auto& [name, height] : group.bars) {
      if (std::isfinite(height)) highest = std::max(highest, height);
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }
  const double step = highest > 0 ? svg::round_step(highest / 6) : 1;
  const double top = step * std::max(1.0, std::ceil(highest / step));
  const double base = kHeight - kBottom, scale = (base - kTop) / top;
  std::string body = svg::text_at(kWidth / 2, 24, "middle", title, " class=\"title\"");
  for (double value = 0; value <= top * 1.001; value += step) {
    body += svg::line(kLeft, base - value * scale, kWidth - kRight, base - value * scale, "stroke=\"#e4e4e4\"");
    body += svg::text_at(kLeft - 6, base - value * scale + 4, "end", fmt::format("{:.6g}", value), " class=\"tick\"");
  }
  body += svg::text_at(18, (kTop + base) / 2, "middle", y_label,
                       fmt::format(" transform=\"rotate(-90 18 {:.1f})\"", (kTop + base) / 2));
  const double group_width = (kWidth - kLeft - kRight) / static_cast<double>(std::max<std::size_t>(1, groups.size()));
  const double bar_width = 0.8 * group_width / static_cast<double>(std::max<std::size_t>(1, names.size()));
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const double left = kLeft + static_cast<double>(g) * group_width;
    body += svg::text_at(left + group_width / 2, base + 18, "middle", groups[g].name);
    for (const auto& [name, height] : groups[g].bars) {
      if (!std::isfinite(height) || height < 0) continue;
      const auto position = std::find(names.begin(), names.end(), name) - names.begin();
      const double x = left + 0.1 * group_width + static_cast<double>(position) * bar_width;
      body += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\"/>\n", x,
                          base - height * scale, 0.92 * bar_width, height * scale,
                          svg::kColours[static_cast<std::size_t>(position) % std::size(svg::kColours)]);
      body += svg::text_at(x + 0.46 * bar_width, base - height * scale - 4, "middle", fmt::format("{:.4g}", height),
                           " class=\"tick\"");
    }
  }
  for (std::size_t i = 0; i < names.size(); ++i) {
    const double x = kLeft + static_cast<double>(i) * 170;
    body += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"12\" height=\"12\" fill=\"{}\"/>\n", x, kHeight - 30,
                        svg::kColours[i % std::size(svg::kColours)]);
    body += svg::text_at(x + 18, kHeight - 20, "start", names[i]);
  }
  return svg::document(kWidth, kHeight, body);
}

}  // namespace ddpkit::bench
