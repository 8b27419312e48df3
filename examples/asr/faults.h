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

/// Kinds of faults of an utterance.
enum class Fault {
  kUnreadable,  ///< Missing, truncated, or not a recording.
  kEmptyTranscript,
  kUnknownCharacter,  ///< The transcript has a character that is not in the alphabet.
  kTooShort,          ///< The target is longer than the model's output.
  kNanLoss,           ///< The loss is NaN or infinite.
};
inline constexpr std::size_t kFaults = 5;
const char* name_of(Fault fault);

enum class FaultPolicy { kStop, kSkip };

/// Faulty files, by kind. Thread-safe.
class Faults {
 public:
  explicit Faults(FaultPolicy policy) : policy_(policy) {}

  /// Reports a fault. `message` begins with the file. Stop: throws InvalidArgument with `message`. Skip: prints
  /// `message` to stderr once per file, and counts the file.
  void add(Fault fault, const std::string& file, const std::string& message);

  /// Returns the number of different files of each kind over all ranks, equal on each rank. Collective. [Fault]
  std::array<std::size_t, kFaults> count(const ddpkit::ProcessGroup& group) const;

  FaultPolicy policy() const noexcept { return policy_; }

 private:
  FaultPolicy policy_;
  mutable std::mutex mutex_;
  std::array<std::set<std::string>, kFaults> files_;
};

/// "2 files skipped: 1 unreadable, 1 with an empty transcript"; "no file skipped".
std::string describe(const std::array<std::size_t, kFaults>& counts);

}  // namespace asr
