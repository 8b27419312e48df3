// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace ddpkit {

/// Base class of ddpkit's errors. The message reports what happened, with the values, and what to do. The fields of
/// Context hold the same facts for programs.
class Error : public std::runtime_error {
 public:
  /// Location of an error. Fields that do not apply are empty.
  struct Context {
    std::optional<int> rank = {};                ///< The rank that caused the error, not the rank that detected it.
    std::string call = {};                       ///< The collective or step, such as "all_reduce".
    std::optional<std::uint64_t> sequence = {};  ///< Number of the collective in its group, from 0.
    std::optional<std::size_t> bucket = {};      ///< Gradient bucket.
  };

  /// `message`: one sentence, returned by what().
  explicit Error(const std::string& message) : std::runtime_error(message) {}
  /// `context`: the facts of the message, for programs.
  Error(const std::string& message, Context context) : std::runtime_error(message), context_(std::move(context)) {}

  /// Returns the facts of the message, for programs.
  const Context& context() const noexcept { return context_; }

 private:
  Context context_;
};

/// A wrong argument, option, environment variable or file. The caller can fix it.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// The ranks could not connect: the port is in use, the master is unreachable, or a rank is missing.
class RendezvousError : public Error {
 public:
  using Error::Error;
};

/// Ranks called different collectives, or the same collective with different types, sizes or roots.
/// Thrown on every rank of the group.
class CollectiveMismatch : public Error {
 public:
  using Error::Error;
};

/// Another rank's process ended, or aborted its group, while this rank needed it.
class PeerLost : public Error {
 public:
  using Error::Error;
};

/// Another rank did not arrive in time.
class Timeout : public Error {
 public:
  using Error::Error;
};

/// The model differs between ranks: thrown on all ranks. Or the model changed after wrapping: other ranks may throw
/// PeerLost.
class ModelMismatch : public Error {
 public:
  using Error::Error;
};

}  // namespace ddpkit
