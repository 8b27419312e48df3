#include "finding.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include <fmt/format.h>

#include <ddpkit/train/json_text.h>

namespace ddpkit::cli {
namespace {

const char* name_of(Severity severity) {
  switch (severity) {
    case Severity::kFine:
      return "fine";
    case Severity::kAdvice:
      return "advice";
    case Severity::kProblem:
      break;
  }
  return "problem";
}

const char* mark_of(Severity severity) {
  switch (severity) {
    case Severity::kFine:
      return "  ok  ";
    case Severity::kAdvice:
      return " hint ";
    case Severity::kProblem:
      break;
  }
  return " FAIL ";
}

Findings to_do(const Findings& findings) {
  Findings advice;
  std::copy_if(findings.begin(), findings.end(), std::back_inserter(advice),
               [](const Finding& finding) { return !finding.advice.empty(); });
  std::stable_sort(advice.begin(), advice.end(), [](const Finding& a, const Finding& b) {
    return a.severity != b.severity ? a.severity > b.severity : a.gain > b.gain;
  });
  return advice;
}

}  // namespace

bool can_train(const Findings& findings) {
  return std::none_of(findings.begin(), findings.end(),
                      [](const Finding& finding) { return finding.severity == Severity::kProblem; });
}

std::string doctor_report(const Findings& findings) {
  std::string text, section;
  for (const Finding& finding : findings) {
    if (finding.section != section) text += fmt::format("{}{}\n", section.empty() ? "" : "\n", finding.section);
    section = finding.section;
    text += fmt::format("[{}] {}\n", mark_of(finding.severity), finding.what);
  }
  const Findings advice = to_do(findings);
  if (!advice.empty()) text += "\nwhat to do\n";
  for (std::size_t i = 0; i < advice.size(); ++i) text += fmt::format("{:>3}. {}\n", i + 1, advice[i].advice);
  return text +
         (can_train(findings) ? "\nTraining can start here.\n" : "\nTraining cannot start here as things are.\n");
}

std::string doctor_json(const Findings& findings) {
  nlohmann::json document = {
      {"can_train", can_train(findings)}, {"findings", nlohmann::json::array()}, {"to_do", nlohmann::json::array()}};
  for (const Finding& finding : findings)
    document["findings"].push_back({{"section", finding.section},
                                    {"severity", name_of(finding.severity)},
                                    {"what", finding.what},
                                    {"advice", finding.advice}});
  for (const Finding& finding : to_do(findings)) document["to_do"].push_back(finding.advice);
  // Names from the environment may be invalid UTF-8.
  return train::json_text(document);
}

}  // namespace ddpkit::cli
