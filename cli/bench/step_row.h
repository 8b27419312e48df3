// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ddpkit::bench {

/// What a rank says of one turn: its steps, one after the other.
struct StepTurn {
  double start_us = 0;     ///< When the first step began, by the clock that the host's processes share.
  std::vector<double> us;  ///< Of each step.
  /// Of each step, from the last gradient to the end of the last all-reduce; empty where nothing is exchanged or
  /// nobody knows.
  std::vector<double> exposed_us;
};

/// What a rank says of itself at the end.
struct StepEnd {
  std::uint64_t params = 0;         ///< Of the model, in elements.
  std::uint64_t buckets = 0;        ///< Buckets a step; 0 where unknown.
  std::uint64_t reduced_bytes = 0;  ///< Bytes of gradient that a step reduces.
  std::uint64_t peak_bytes = 0;     ///< Largest resident memory of the process.
  std::uint64_t memory_bytes = 0;   ///< What training has taken: of memory shared by processes, each one's part.
  std::uint64_t wrong = 0;          ///< Weights that differ from rank 0's in any bit, or are not finite.
};

/// How the measuring processes write these, each in one line behind kStepReport, and how they are read: nothing when
/// the line is none.
inline constexpr std::string_view kStepReport = "ddpkit bench step: ";
std::string to_report(const StepTurn& turn);
std::string to_report(const StepEnd& end);
std::optional<StepTurn> parse_step_turn(std::string_view text);
std::optional<StepEnd> parse_step_end(std::string_view text);

/// One system's turns: what becomes of them.
class StepSeries {
 public:
  /// `together`: the ranks wait for each other, so that a step is over when its last rank has ended it, and took the
  /// time since the step before was over. (Not the longest of the ranks' own times: who is late in one step is waited
  /// for in the next, and would count twice.) Otherwise they are strangers, and every step counts by itself. [rank]
  void add_turn(const std::vector<StepTurn>& turns, bool together);

  double us() const;                         ///< Median over all steps.
  std::optional<double> exposed_us() const;  ///< The same.
  /// How long a step takes relative to one of `alone`, measured in the same rounds: the median over the rounds of
  /// the ratios of their medians. A drift of the machine that lasts for a round or more cancels out.
  double ratio_to(const StepSeries& alone) const;

 private:
  std::vector<double> us_;
  std::vector<double> exposed_us_;
  std::vector<double> round_us_;  ///< Medians. [round]
};

/// One measurement.
struct StepRow {
  /// "alone", "alone-x2", "alone-barrier", "ddpkit-shm", "ddpkit-gloo", "python-ddp-gloo", "python-alone"; of an update
  /// that is not torch's with its name behind: "ddpkit-shm-sharded".
  std::string system;
  std::string model;
  std::string optimizer;
  std::int64_t batch = 0;
  int ranks = 1;              ///< Processes at once.
  std::string bucket_cap_mb;  ///< "default", "one", MiB; empty where there are no buckets.
  double us = 0;              ///< Of one step, median.
  double ratio_to_alone = 1;
  std::optional<double> exposed_us = std::nullopt;
  StepEnd end = {};  ///< The largest over the ranks; `wrong` is the sum.
};

/// Puts the ranks' last words together.
StepEnd over_ranks(const std::vector<StepEnd>& ends);

/// The first line of a CSV file.
inline constexpr std::string_view kStepCsvHeader =
    "system,params,batch,ranks,us,ratio_to_alone,model,optimizer,bucket_cap_mb,buckets,exposed_us,reduced_bytes,"
    "peak_bytes,wrong,memory_bytes";

/// A row of a CSV file, without the end of line.
std::string to_csv(const StepRow& row);

/// The table's head (two lines) and a row of it, without the end of line.
std::string step_table_header();
std::string table_row(const StepRow& row);

}  // namespace ddpkit::bench
