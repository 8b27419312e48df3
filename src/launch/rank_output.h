// Tier 0: the standard library only. Forwards the output of the ranks.
#pragma once

#include <poll.h>
#include <unistd.h>

#include <deque>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <ddpkit/launch/launch_options.h>

namespace ddpkit::launcher {

/// The streams of all ranks of a launch.
///
/// Rank 0 has the launcher's stdin and stdout. Its stderr passes through this object, which keeps the last lines. If
/// the launcher's stderr is a terminal, rank 0's stderr is a pseudo-terminal, so progress bars work. If stdout and
/// stderr are the same terminal or file, both pass through here, to keep their order. The lines of other ranks go to
/// stderr after "[rank N] ".
class RankOutput {
 public:
  /// `keeps_waiting`: called repeatedly while the reader of this process's output blocks. When it returns false, the
  /// remaining output is dropped.
  RankOutput(const LaunchOptions& options, std::function<bool()> keeps_waiting);
  ~RankOutput();
  RankOutput(const RankOutput&) = delete;
  RankOutput& operator=(const RankOutput&) = delete;

  /// The descriptors of a rank's streams; -1: inherited from the launcher.
  struct Ends {
    int in = -1, out = -1, err = -1;
    bool has_terminal = false;  ///< Reads the launcher's terminal, so it must stay in the launcher's process group.
  };
  /// Call before and after the start of the rank. `replaces`: its output continues that of a lost rank.
  Ends open(int rank, bool replaces = false);
  void close_ends(const Ends& ends);

  bool empty() const noexcept { return streams_.empty(); }
  /// Adds the descriptors to poll.
  void add_to(std::vector<pollfd>& descriptors) const;
  /// Reads available output from the descriptors that add_to() added from index `first` on.
  void read(const std::vector<pollfd>& descriptors, std::size_t first);
  void close_all();

  /// Writes to this process's stderr.
  void log(std::string_view text) const { write(STDERR_FILENO, text); }

  /// Returns the last lines of its stderr. [line]
  std::vector<std::string> last_lines(int rank) const;
  /// Returns the folder of a rank's log files; empty without a log folder.
  std::filesystem::path folder(int rank) const;

 private:
  /// One stream of a rank. One stream for stdout and stderr if both are the same file.
  struct Stream {
    int fd = -1;
    int rank = 0;
    bool is_error = false;
    int file = -1;      ///< The log file.
    int terminal = -1;  ///< Descriptor for unchanged output; -1: no output, or line by line.
    bool by_line = false;
    std::string pending = {};
  };

  int rank_in_job(int rank) const { return options_.node_rank * options_.ranks + rank; }
  int open_stream(Stream stream, bool through_terminal);
  int open_log(int rank, const char* name, bool replaces) const;
  void write(int fd, std::string_view text) const;
  void take(Stream& stream, std::string_view text);
  void remember(int rank, std::string_view text);
  void close(std::size_t index);

  const LaunchOptions& options_;
  std::function<bool()> keeps_waiting_;
  int attempt_ = 0;  ///< Attempt number in the log folder.
  std::vector<Stream> streams_;
  std::vector<std::deque<std::string>> last_lines_;  ///< The last line may be incomplete. [rank]
};

}  // namespace ddpkit::launcher
