#include "judge.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>

#include <fmt/format.h>

#include "model.h"

namespace ddpkit::fuzz {
namespace {

/// Factor of the rounding errors that a result may have, and of the disturbed reference's distance from the reference.
/// That distance measures the condition number of the case: a norm of nearly equal elements, or several steps, can
/// amplify any rounding error.
constexpr double kRoundings = 32;
constexpr double kOfDisturbance = 16;

/// Relative to the largest element of a tensor.
double tolerance(const Case& drawn) {
  const bool power_sgd = drawn.wrapper.hook == "power_sgd";
  const double rounding = rounding_of(drawn).gradients;
  // The disturbed reference omits the rounding errors inside a layer. Several norms in float32 need a larger tolerance.
  return rounding > Rounding::kOfDouble ? std::max(2e-3, kRoundings * rounding) : power_sgd ? 1e-5 : 1e-9;
}

/// Returns the distance that rounding errors move the tensor in one run. Infinite if that run took another branch.
double movement(const Entry& expected, const Entry& disturbed) {
  if (disturbed.name != expected.name || disturbed.event != expected.event ||
      disturbed.values.size() != expected.values.size())
    return INFINITY;
  double largest = 0;
  for (std::size_t i = 0; i < expected.values.size(); ++i) {
    if (!std::isfinite(expected.values[i])) continue;
    const double moved = std::abs(disturbed.values[i] - expected.values[i]);
    largest = std::isnan(moved) ? INFINITY : std::max(largest, moved);
  }
  return largest;
}

bool close(double value, double expected, double limit) {
  if (std::isnan(expected)) return std::isnan(value);
  if (std::isinf(expected)) return value == expected;
  return std::abs(value - expected) <= limit;
}

std::string difference(const Case& drawn, const Entry& entry, const Entry& expected, double moved, std::size_t rank) {
  const std::string where = fmt::format("{} on rank {} after event {}", entry.name, rank, entry.event);
  if (entry.name != expected.name || entry.event != expected.event)
    return fmt::format("{}: the reference has {} of event {}", where, expected.name, expected.event);
  if (entry.values.size() != expected.values.size())
    return fmt::format("{}: {} elements instead of {}", where, entry.values.size(), expected.values.size());
  // Elements that are zero except for rounding errors.
  double scale = (rounding_of(drawn).gradients > Rounding::kOfDouble ? 0.1 : 1e-3) * std::max(1.0, drawn.magnitude) *
                 (drawn.optimizer.scaler && expected.name.rfind("gradient", 0) == 0 ? 1024 : 1);
  for (const double value : expected.values)
    if (std::isfinite(value)) scale = std::max(scale, std::abs(value));
  const double limit = tolerance(drawn) * scale + kOfDisturbance * moved;
  for (std::size_t i = 0; i < entry.values.size(); ++i) {
    if (!close(entry.values[i], expected.values[i], limit))
      return fmt::format("{}: element {} is {} instead of {}", where, i, entry.values[i], expected.values[i]);
  }
  return {};
}

/// Over gloo, an error on one rank appears to the others as a lost connection: ProcessGroup::abort() does not reach
/// them.
bool is_lost_connection(const std::string& message) { return message.find("gloo/transport/") != std::string::npos; }

/// Compares the reports before the first failure, if any.
Verdict compare(const Case& drawn, const std::vector<Report>& reports,
                const std::vector<std::vector<Report>>& references) {
  const std::vector<Report>& reference = references[0];
  std::size_t common = reference[0].entries.size();
  for (std::size_t rank = 0; rank < reports.size(); ++rank)
    common = std::min({common, reports[rank].entries.size(), reference[rank].entries.size()});
  const auto step = std::find_if(drawn.events.begin(), drawn.events.end(),
                                 [](const Event& event) { return event.kind == "step" || event.kind == "join"; });
  const auto first_step = static_cast<std::uint32_t>(step - drawn.events.begin());
  for (std::size_t i = 0; i < common; ++i) {
    // After a step, or for a value near the limit of the type, the result depends on intermediate types.
    const Entry& expected = reference[0].entries[i];
    if (drawn.magnitude != 1 &&
        (expected.event > first_step || std::any_of(expected.values.begin(), expected.values.end(),
                                                    [](double value) { return !std::isfinite(value); })))
      break;
    for (std::size_t rank = 0; rank < reports.size(); ++rank) {
      double moved = 0;
      for (std::size_t run = 1; run < references.size(); ++run) {
        const auto& disturbed = references[run][rank].entries;
        moved = std::max(moved, movement(reference[rank].entries[i], i < disturbed.size() ? disturbed[i] : Entry()));
      }
      const std::string text = difference(drawn, reports[rank].entries[i], reference[rank].entries[i], moved, rank);
      if (!text.empty()) {
        const std::string& name = reference[rank].entries[i].name;
        return {"WRONG " + name.substr(0, name.find(' ')), text};
      }
    }
    const Entry& first = reports[0].entries[i];
    if (first.kind == Kind::kLocal) continue;
    for (std::size_t rank = 1; rank < reports.size(); ++rank) {
      // The case itself makes the ranks differ.
      if (reference[rank].entries[i].values != reference[0].entries[i].values) continue;
      const Entry& other = reports[rank].entries[i];
      // Ranks that have not used an ignored layer have no optimizer state of it.
      if (other.name != first.name || other.event != first.event || other.values.size() != first.values.size())
        continue;
      if (std::memcmp(first.values.data(), other.values.data(), first.values.size() * sizeof(double)) != 0 &&
          std::none_of(first.values.begin(), first.values.end(), [](double value) { return std::isnan(value); }))
        return {"BITS", fmt::format("{} after event {} differs between ranks 0 and {}", first.name, first.event, rank)};
    }
  }
  return {"PASS", ""};
}

}  // namespace

Rounding rounding_of(const Case& drawn) {
  const std::map<std::string, double> epsilons{{"f32", 0x1p-23}, {"fp16", 0x1p-10}, {"f16", 0x1p-10}, {"bf16", 0x1p-7}};
  const auto widen = [&](double& rounding, const std::string& type) {
    if (const auto found = epsilons.find(type); found != epsilons.end()) rounding = std::max(rounding, found->second);
  };
  Rounding rounding{.values = Rounding::kOfDouble};
  widen(rounding.values, drawn.dtype);
  widen(rounding.values, drawn.autocast);
  for (const Node& node : drawn.nodes) widen(rounding.values, node.dtype);
  for (const Event& event : drawn.events)
    if (event.kind == "cast") widen(rounding.values, "f32");
  rounding.gradients = rounding.values;
  widen(rounding.gradients, drawn.wrapper.hook);
  for (const Event& event : drawn.events)
    if (event.kind == "hook") widen(rounding.gradients, event.how);
  return rounding;
}

Verdict judge(const Case& drawn, const std::vector<Report>& reports,
              const std::vector<std::vector<Report>>& references) {
  if (const Verdict verdict = compare(drawn, reports, references); verdict.is_fault()) return verdict;
  const std::vector<Report>& reference = references[0];
  const auto failed = [](const Report& report) { return report.failure != Failure::kNone; };
  const auto count = static_cast<std::size_t>(std::count_if(reports.begin(), reports.end(), failed));
  const bool reference_failed = failed(reference[0]);
  if (count == 0) {
    if (reference_failed)
      return {"ACCEPTED", fmt::format("event {} fails without ddpkit ({}), but not with it", reference[0].failed_event,
                                      reference[0].message)};
    for (std::size_t rank = 0; rank < reports.size(); ++rank)
      if (reports[rank].entries.size() != reference[rank].entries.size())
        return {"WRONG entries", fmt::format("rank {} has another number of tensors than the reference", rank)};
    return {"PASS", ""};
  }
  std::string words;
  for (std::size_t rank = 0; rank < reports.size(); ++rank)
    words += fmt::format("{}rank {}: {}", rank == 0 ? "" : "; ", rank,
                         failed(reports[rank])
                             ? fmt::format("event {}: {}", reports[rank].failed_event, reports[rank].message)
                             : "no error");
  for (const Report& report : reports)
    if (report.failure == Failure::kTimeout) return {"HANG", words};
  if (count < reports.size()) return {"SOME", words};
  // Over gloo, a slow rank may be notified of another rank's failure while it still waits for an earlier collective.
  // Over shm, a collective that all ranks have completed succeeds.
  const auto lost = [](const Report& report) { return report.failure == Failure::kPeerLost; };
  const bool without_lost = drawn.backend != "shm" && !std::all_of(reports.begin(), reports.end(), lost);
  std::uint32_t first_event = UINT32_MAX;
  for (const Report& report : reports)
    if (!without_lost || !lost(report)) first_event = std::min(first_event, report.failed_event);
  if (reference_failed && first_event >= reference[0].failed_event) {
    // All ranks report the program's exception, also those that did not throw it.
    for (const Report& report : reports)
      if (reference[0].message == Model::Thrown().what() && !is_lost_connection(report.message) &&
          report.message.find(reference[0].message) == std::string::npos && !may_refuse(drawn, report.message))
        return {"UNNAMED", words};
    return {"ALIKE", reference[0].message};
  }
  bool named = false;
  for (const Report& report : reports) {
    const bool allowed = may_refuse(drawn, report.message);
    if (report.failure == Failure::kOther && !allowed) return {"UNNAMED", words};
    named = named || (report.failure != Failure::kPeerLost && allowed && !is_lost_connection(report.message));
  }
  for (const Report& report : reports) {
    if (report.failure == Failure::kDdpkit && !may_refuse(drawn, report.message)) return {"UNEXPECTED", words};
  }
  return {named ? "REFUSED" : "UNEXPECTED", words};
}

}  // namespace ddpkit::fuzz
