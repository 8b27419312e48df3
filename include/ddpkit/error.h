// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace ddpkit {

/// What ddpkit throws. The message alone says what went wrong, with the offending values, and
/// what to do; the fields hold the same facts for programs.
class Error : public std::runtime_error {
 public:
  /// Where an error happened; whatever does not apply is left empty.
  struct Context {
    std::optional<int> rank = {};                ///< The rank at fault, not the one that noticed.
    std::string call = {};                       ///< The collective or step, such as "all_reduce".
    std::optional<std::uint64_t> sequence = {};  ///< Number of the collective in its group, from 0.
    std::optional<std::size_t> bucket = {};      ///< Gradient bucket.
  };

  /// `message`: one sentence, which what() gives back.
  explicit Error(const std::string& message) : std::runtime_error(message) {}
  Error(const std::string& message, Context context) : std::runtime_error(message), context_(std::move(context)) {}

  /// The facts in the message, for programs.
  const Context& context() const noexcept { return context_; }

 private:
  Context context_;
};

/// A wrong argument, option, environment variable or file. The caller can mend it.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// The ranks could not meet: port taken, master unreachable, a rank that never came.
class RendezvousError : public Error {
 public:
  using Error::Error;
};

/// Ranks called different collectives, or the same one with other types, sizes or roots.
/// Thrown on every rank of the group.
class CollectiveMismatch : public Error {
 public:
  using Error::Error;
};

/// Another rank's process has ended, or gave up its group, while this rank needed it.
class PeerLost : public Error {
 public:
  using Error::Error;
};

/// Another rank did not arrive in time.
class Timeout : public Error {
 public:
  using Error::Error;
};

/// The model differs between ranks: thrown on all. Or it has changed since wrapping: others may throw PeerLost.
class ModelMismatch : public Error {
 public:
  using Error::Error;
};

}  // namespace ddpkit
