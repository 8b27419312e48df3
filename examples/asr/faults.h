// Tier 0: the standard library only.
#pragma once

#include <array>
#include <cstddef>
#include <mutex>
#include <set>
#include <string>

namespace ddpkit {
class ProcessGroup;
}

namespace asr {

/// What can be wrong with an utterance.
enum class Fault {
  kUnreadable,        ///< Missing, truncated, no recording.
  kEmptyTranscript,   ///< Nothing is said.
  kUnknownCharacter,  ///< The transcript has one that is not in the alphabet.
  kTooShort,          ///< The target is longer than the model's frames.
  kNanLoss,           ///< Its loss is NaN or infinite.
};
inline constexpr std::size_t kFaults = 5;
const char* name_of(Fault fault);

enum class FaultPolicy { kStop, kSkip };

/// Files that are wrong, by kind. Safe to call from several threads.
class Faults {
 public:
  explicit Faults(FaultPolicy policy) : policy_(policy) {}

  /// `message` begins with the file. Stop: throws InvalidArgument with it. Skip: prints it to stderr, once a file, and
  /// counts the file.
  void add(Fault fault, const std::string& file, const std::string& message);

  /// Different files of each kind over all ranks; the same on each. Collective. [Fault]
  std::array<std::size_t, kFaults> count(const ddpkit::ProcessGroup& group) const;

  FaultPolicy policy() const noexcept { return policy_; }

 private:
  FaultPolicy policy_;
  mutable std::mutex mutex_;
  std::array<std::set<std::string>, kFaults> files_;
};

/// "2 files left out: 1 unreadable, 1 with an empty transcript"; "no file left out".
std::string describe(const std::array<std::size_t, kFaults>& counts);

}  // namespace asr
