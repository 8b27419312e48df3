// Tier 0: the standard library only. What becomes of what the ranks print.
#pragma once

#include <poll.h>
#include <unistd.h>

#include <deque>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <ddpkit/launch/launcher.h>

namespace ddpkit::launch {

/// The streams of all ranks of a launch.
///
/// Rank 0 has the launcher's stdin and stdout; its stderr comes by here, so that its last lines are known, by way of a
/// pseudo-terminal where the launcher's is a terminal: progress bars look. Where both are the same terminal or file,
/// they come by one way, in the order in which they were written. The other ranks' lines go to stderr behind "[rank N]
/// ".
class RankOutput {
 public:
  /// `goes_on`: asked again and again while whoever reads this process's output takes none; once it is false, what is
  /// left is dropped.
  RankOutput(const LocalLaunchOptions& options, std::function<bool()> goes_on);
  ~RankOutput();
  RankOutput(const RankOutput&) = delete;
  RankOutput& operator=(const RankOutput&) = delete;

  /// A rank's ends of its streams; -1: the launcher's own.
  struct Ends {
    int in = -1, out = -1, err = -1;
    bool has_terminal = false;  ///< It reads the launcher's terminal, and must stay in its process group for that.
  };
  /// Before the rank is started, and after.
  Ends open(int rank);
  void close_ends(const Ends& ends);

  bool empty() const noexcept { return streams_.empty(); }
  /// Adds what to wait for.
  void add_to(std::vector<pollfd>& descriptors) const;
  /// Takes what is there of the descriptors that add_to() added from `first` on.
  void read(const std::vector<pollfd>& descriptors, std::size_t first);
  void close_all();

  /// To this process's stderr, beside the ranks' lines.
  void say(std::string_view text) const { write(STDERR_FILENO, text); }

  /// Of its stderr. [line]
  std::vector<std::string> last_lines(int rank) const;
  /// The folder of a rank's files; empty without a log folder.
  std::filesystem::path folder(int rank) const;

 private:
  /// One stream of a rank; stdout and stderr in one where nobody could tell them apart.
  struct Stream {
    int fd = -1;
    int rank = 0;
    bool is_error = false;
    int file = -1;      ///< The log.
    int terminal = -1;  ///< Where it goes as it is; -1: nowhere, or by line.
    bool by_line = false;
    std::string pending = {};
  };

  int rank_in_job(int rank) const { return options_.node_rank * options_.ranks + rank; }
  int open_stream(Stream stream, bool through_terminal);
  int open_log(int rank, const char* name) const;
  void write(int fd, std::string_view text) const;
  void take(Stream& stream, std::string_view text);
  void remember(int rank, std::string_view text);
  void close(std::size_t index);

  const LocalLaunchOptions& options_;
  std::function<bool()> goes_on_;
  int attempt_ = 0;  ///< Of the log folder.
  std::vector<Stream> streams_;
  std::vector<std::deque<std::string>> last_lines_;  ///< The newest may be unfinished. [rank]
};

}  // namespace ddpkit::launch
