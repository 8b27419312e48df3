#include "plot.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include <ddpkit/train/svg.h>

#include "plan.h"

namespace ddpkit::bench {
namespace {

using train::svg::kColours;
using train::svg::line;
using train::svg::text_at;

constexpr double kPanelWidth = 560, kPanelHeight = 460;
constexpr double kLeft = 70, kRight = 20, kTop = 40, kBottom = 110;

/// Maps the numbers from `low` to `high` to the pixels from `from` to `to`, on a logarithmic scale.
struct Scale {
  double low, high, from, to;
  double operator()(double value) const {
    return from + (std::log(value) - std::log(low)) / (std::log(high) - std::log(low)) * (to - from);
  }
};

bool is_drawable(const std::pair<double, double>& point) {
  return point.first > 0 && point.second > 0 && std::isfinite(point.first) && std::isfinite(point.second);
}

class PanelDrawing {
 public:
  explicit PanelDrawing(const Panel& panel) : panel_(panel) {
    double low[2], high[2];
    std::fill_n(low, 2, std::numeric_limits<double>::infinity());
    std::fill_n(high, 2, 0.0);
    for (const Curve& curve : panel.curves) {
      for (const auto& point : curve.points) {
        if (!is_drawable(point)) continue;
        low[0] = std::min(low[0], point.first), high[0] = std::max(high[0], point.first);
        low[1] = std::min(low[1], point.second), high[1] = std::max(high[1], point.second);
      }
    }
    has_points_ = high[0] > 0;
    if (!has_points_) return;
    x_ = {low[0] / 1.3, high[0] * 1.3, kLeft, kPanelWidth - kRight};
    // Full decades.
    y_ = {std::pow(10, std::floor(std::log10(low[1]))), std::pow(10, std::floor(std::log10(high[1]) - 1e-9) + 1),
          kPanelHeight - kBottom, kTop};
  }

  bool has_points() const { return has_points_; }

  std::string draw(const std::string& y_label, const std::string& x_label) const {
    std::string svg = text_at((kLeft + kPanelWidth - kRight) / 2, 24, "middle", panel_.title, " class=\"title\"");
    svg += grid(x_label == "bytes");
    svg += text_at((kLeft + kPanelWidth - kRight) / 2, kPanelHeight - kBottom + 38, "middle", x_label);
    svg += text_at(18, (kTop + kPanelHeight - kBottom) / 2, "middle", y_label,
                   fmt::format(" transform=\"rotate(-90 18 {:.1f})\"", (kTop + kPanelHeight - kBottom) / 2));
    std::size_t colour = 0, at = 0;
    for (const Curve& curve : panel_.curves) {
      const std::string style = fmt::format("fill=\"none\" stroke=\"{}\" stroke-width=\"2\"{}",
                                            curve.dashed ? "#444444" : kColours[colour++ % std::size(kColours)],
                                            curve.dashed ? " stroke-dasharray=\"6 4\"" : "");
      svg += draw_curve(curve, style);
      // The legend is at the bottom, in two columns.
      const double x = kLeft + static_cast<double>(at % 2) * 240;
      const double y = kPanelHeight - kBottom + 60 + static_cast<double>(at / 2) * 17;
      svg += line(x, y - 4, x + 26, y - 4, style);
      svg += text_at(x + 32, y, "start", curve.name);
      ++at;
    }
    return svg;
  }

 private:
  std::string grid(bool is_bytes) const {
    const std::string thin = "stroke=\"#e4e4e4\"", frame = "stroke=\"#bbbbbb\"";
    std::string svg;
    const int steps = static_cast<int>(std::log2(x_.high / x_.low));
    const double factor = steps > 10 ? 4 : 2;
    for (double bytes = std::exp2(std::ceil(std::log2(x_.low))); bytes <= x_.high; bytes *= factor) {
      svg += line(x_(bytes), y_.from, x_(bytes), y_.to, thin);
      svg += text_at(x_(bytes), y_.from + 18, "middle",
                     is_bytes ? format_bytes(static_cast<std::uint64_t>(bytes)) : fmt::format("{}", bytes),
                     " class=\"tick\"");
    }
    for (double decade = y_.low; decade <= y_.high * 1.001; decade *= 10) {
      svg += line(x_.from, y_(decade), x_.to, y_(decade), frame);
      svg += text_at(x_.from - 6, y_(decade) + 4, "end", fmt::format("{:.4g}", decade), " class=\"tick\"");
      for (int part = 2; part < 10 && decade * part < y_.high; ++part)
        svg += line(x_.from, y_(decade * part), x_.to, y_(decade * part), thin);
    }
    return svg + line(x_.from, y_.from, x_.from, y_.to, frame) + line(x_.to, y_.from, x_.to, y_.to, frame);
  }

  std::string draw_curve(const Curve& curve, const std::string& style) const {
    std::string path, marks;
    for (const auto& point : curve.points) {
      if (!is_drawable(point)) continue;
      path += fmt::format("{}{:.1f},{:.1f}", path.empty() ? "" : " ", x_(point.first), y_(point.second));
      marks +=
          fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"2.5\" {}/>\n", x_(point.first), y_(point.second), style);
    }
    return fmt::format("<polyline points=\"{}\" {}/>\n", path, style) + marks;
  }

  const Panel& panel_;
  bool has_points_ = false;
  Scale x_{}, y_{};
};

}  // namespace

std::string draw_log_log(const std::vector<Panel>& panels, const std::string& y_label, const std::string& x_label) {
  std::string body;
  int drawn = 0;
  for (const Panel& panel : panels) {
    const PanelDrawing drawing(panel);
    if (!drawing.has_points()) continue;
    body += fmt::format("<g transform=\"translate({} {})\">\n", drawn % 2 * kPanelWidth, drawn / 2 * kPanelHeight);
    body += drawing.draw(y_label, x_label) + "</g>\n";
    ++drawn;
  }
  const double width = kPanelWidth * std::clamp(drawn, 1, 2), height = kPanelHeight * std::max(1, (drawn + 1) / 2);
  return train::svg::document(width, height, body);
}

std::vector<Panel> panels_of(const std::vector<Row>& rows) {
  std::vector<Panel> panels;
  const auto named = [](auto& all, const std::string& name, auto key) -> auto& {
    const auto at = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.*key == name; });
    if (at != all.end()) return *at;
    all.emplace_back();
    all.back().*key = name;
    return all.back();
  };
  for (const Row& row : rows) {
    Panel& panel = named(panels, fmt::format("{}, {} ranks", row.collective, row.ranks), &Panel::title);
    const bool is_limit = row.backend == "limit";
    // Only shm has both kinds of memory.
    const std::string name = is_limit               ? "limit: the same traffic in a bare loop"
                             : row.backend == "shm" ? fmt::format("shm, {} memory", row.memory)
                                                    : row.backend;
    Curve& curve = named(panel.curves, name, &Curve::name);
    curve.dashed = is_limit;
    curve.points.emplace_back(static_cast<double>(row.bytes), row.busbw_GBps());
  }
  return panels;
}

}  // namespace ddpkit::bench
