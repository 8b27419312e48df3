// Tier 1.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/join.h>

namespace ddpkit {

/// Events that DistributedDataParallel announces within join().
enum JoinEvent : int { kJoinBuffers, kJoinBucket, kJoinEndOfBackward };

/// Communication between the ranks of a join(). A rank with inputs announces each of its collectives. Ranks without
/// inputs take part in the announcements and make matching calls.
///
/// An announcement is one all-reduce (sum) of a few numbers. Ranks without inputs contribute zeros.
class JoinSession {
 public:
  /// Events for plain collectives on the group, without an object.
  enum class Plain { kAllReduce, kAllGather };

  JoinSession(ProcessGroup group, std::vector<Joinable*> joinables, const JoinOptions& options);
  ~JoinSession();
  JoinSession(const JoinSession&) = delete;
  JoinSession& operator=(const JoinSession&) = delete;

  /// Returns the session in which this rank runs its loop on `group`; null outside a session.
  static JoinSession* running(const ProcessGroup& group);
  static void announce_if_running(const ProcessGroup& group, Plain collective, const at::Tensor& tensor);

  /// Announces the collectives of object `index` for `event`. Call before these collectives.
  void announce(int index, int event);
  /// Announces an all-reduce or all-gather of a tensor like this one. Zeros must be neutral for the tensor.
  void announce(Plain collective, const at::Tensor& tensor);
  /// Returns the number of ranks that had inputs at the last announcement. Waits for it.
  int active();
  const JoinOptions& options() const noexcept { return options_; }

  /// Returns the lowest rank with inputs. Collective.
  int first_active(bool this_rank_is) const;

  /// Counts an input of this rank. A model with only frozen parameters announces nothing.
  void count_forward() noexcept { ++forwards_; }

  /// Takes part in the others' collectives after this rank's loop has ended. Returns a rank that had inputs until the
  /// end.
  int shadow_the_others();
  /// Ends the session for the joinables: see Joinable::join_end().
  void end(int source);

 private:
  struct Message;
  void start(const Message& message);

  ProcessGroup group_;
  std::vector<Joinable*> joinables_;
  JoinOptions options_;
  bool in_loop_ = true;
  std::int64_t forwards_ = 0;
  at::Tensor last_;  ///< The last announcement.
  Work work_;
};

}  // namespace ddpkit
