// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ddpkit::bench {

/// The report of a rank on one turn of consecutive steps.
struct StepTurn {
  double start_us = 0;     ///< Start of the first step. All processes of the host share this clock.
  std::vector<double> us;  ///< Per step.
  /// Per step, from the last gradient to the end of the last all-reduce. Empty if nothing is exchanged or the time is
  /// unknown.
  std::vector<double> exposed_us;
};

/// The final report of a rank.
struct StepEnd {
  std::uint64_t params = 0;         ///< Elements of the model.
  std::uint64_t buckets = 0;        ///< Buckets per step; 0: unknown.
  std::uint64_t reduced_bytes = 0;  ///< Gradient bytes reduced per step.
  std::uint64_t peak_bytes = 0;     ///< Largest resident memory of the process.
  std::uint64_t memory_bytes = 0;   ///< Memory for training. Shared memory counts proportionally.
  std::uint64_t wrong = 0;          ///< Weights that differ from rank 0's in any bit, or are not finite.
};

/// Format and parse the reports: one line each, after kStepReport. The parsers return nothing for other lines.
inline constexpr std::string_view kStepReport = "ddpkit bench step: ";
std::string to_report(const StepTurn& turn);
std::string to_report(const StepEnd& end);
std::optional<StepTurn> parse_step_turn(std::string_view text);
std::optional<StepEnd> parse_step_end(std::string_view text);

/// Summarizes the turns of one system.
class StepSeries {
 public:
  /// Adds a turn. [rank]
  /// `together`: the ranks synchronize in each step. The step ends when the last rank ends it; its time is measured
  /// from the end of the previous step. The maximum over the ranks would count a delay twice: in the late rank's step,
  /// and in the next step, in which the others wait. If false, the ranks are independent and each step of each rank
  /// counts.
  void add_turn(const std::vector<StepTurn>& turns, bool together);

  double us() const;                         ///< Median over all steps.
  std::optional<double> exposed_us() const;  ///< Median over all steps.
  /// Returns the time of a step relative to `alone`, measured in the same rounds: the median over the rounds of the
  /// ratios of their medians. This cancels a drift of the machine that lasts for a round or more.
  double ratio_to(const StepSeries& alone) const;

 private:
  std::vector<double> us_;
  std::vector<double> exposed_us_;
  std::vector<double> round_us_;  ///< Medians. [round]
};

struct StepRow {
  /// "alone", "alone-x2", "alone-barrier", "ddpkit-shm", "ddpkit-gloo", "python-ddp-gloo", "python-alone". If the
  /// update is not torch's, its name is appended: "ddpkit-shm-sharded".
  std::string system;
  std::string model;
  std::string optimizer;
  std::int64_t batch = 0;
  int ranks = 1;              ///< Simultaneous processes.
  std::string bucket_cap_mb;  ///< "default", "one", MiB; empty without buckets.
  double us = 0;              ///< Median time of one step.
  double ratio_to_alone = 1;
  std::optional<double> exposed_us = std::nullopt;
  StepEnd end = {};  ///< The largest values over the ranks; for `wrong`, the sum.
};

/// Combines the final reports of the ranks.
StepEnd over_ranks(const std::vector<StepEnd>& ends);

/// The first line of a CSV file.
inline constexpr std::string_view kStepCsvHeader =
    "system,params,batch,ranks,us,ratio_to_alone,model,optimizer,bucket_cap_mb,buckets,exposed_us,reduced_bytes,"
    "peak_bytes,wrong,memory_bytes";

/// Returns a row of a CSV file, without the line end.
std::string to_csv(const StepRow& row);

/// Return the header (two lines) and a row of the table, without the line end.
std::string step_table_header();
std::string table_row(const StepRow& row);

}  // namespace ddpkit::bench
