#include <ddpkit/train/metrics.h>
#include <ddpkit/train/svg.h>

#include <algorithm>

#include <fmt/format.h>

namespace ddpkit::train {

std::string confusion_table(const ClassificationResult& result, const std::vector<std::string>& class_names) {
  constexpr std::size_t kWidest = 24;
  std::size_t widest = 5, digits = 2;
  for (const std::string& name : class_names) widest = std::max(widest, std::min(name.size(), kWidest));
  for (const auto& row : result.confusion) {
    for (const std::int64_t count : row) digits = std::max(digits, std::to_string(count).size());
  }
  std::string table = fmt::format("{:{}}", "class", widest);
  for (std::size_t k = 0; k < result.confusion.size(); ++k) table += fmt::format("  {:>{}}", k + 1, digits);
  table += "      F1   (columns: taken for class number ...)";
  const std::vector<double> f1 = result.f1();
  for (std::size_t k = 0; k < result.confusion.size(); ++k) {
    table += fmt::format("\n{:{}}", class_names[k].substr(0, widest), widest);
    for (const std::int64_t count : result.confusion[k]) table += fmt::format("  {:>{}}", count, digits);
    table += fmt::format("  {:6.3f}", f1[k]);
  }
  return table + fmt::format("\nmacro F1 {:.3f}", result.macro_f1());
}

std::string confusion_svg(const ClassificationResult& result, const std::vector<std::string>& class_names) {
  constexpr double kCell = 56, kLeft = 190, kTop = 90, kRight = 20, kBottom = 30;
  const auto classes = static_cast<double>(result.confusion.size());
  const double width = kLeft + classes * kCell + kRight, height = kTop + classes * kCell + kBottom;
  std::string body = svg::text_at(
      width / 2, 24, "middle",
      fmt::format("accuracy {:.1f} %, macro F1 {:.3f}", 100 * result.accuracy, result.macro_f1()), " class=\"title\"");
  body += svg::text_at(kLeft + classes * kCell / 2, 48, "middle", "predicted class", " class=\"tick\"");
  for (std::size_t target = 0; target < result.confusion.size(); ++target) {
    const double x = kLeft + static_cast<double>(target) * kCell, y = kTop + static_cast<double>(target) * kCell;
    body += svg::text_at(x + kCell / 2, kTop - 10, "middle", fmt::format("{}", target + 1));
    body += svg::text_at(kLeft - 10, y + kCell / 2 + 4, "end",
                         fmt::format("{} {}", class_names[target].substr(0, 24), target + 1));
    std::int64_t of_class = 0;
    for (const std::int64_t count : result.confusion[target]) of_class += count;
    for (std::size_t predicted = 0; predicted < result.confusion.size(); ++predicted) {
      const std::int64_t count = result.confusion[target][predicted];
      const double share = of_class > 0 ? static_cast<double>(count) / static_cast<double>(of_class) : 0;
      const double column = kLeft + static_cast<double>(predicted) * kCell;
      body += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\" fill-opacity=\"{:.3f}\" "
          "stroke=\"#e4e4e4\"/>\n",
          column, y, kCell, kCell, svg::kColours[0], share);
      body += svg::text_at(column + kCell / 2, y + kCell / 2 + 4, "middle", fmt::format("{}", count),
                           share > 0.5 ? " fill=\"white\"" : "");
    }
  }
  return svg::document(width, height, body);
}

}  // namespace ddpkit::train
