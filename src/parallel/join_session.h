// Tier 1.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/join.h>

namespace ddpkit {

/// What DistributedDataParallel announces within join().
enum JoinEvent : int { kJoinBuffers, kJoinBucket, kJoinEndOfBackward };

/// What the ranks of a join() tell each other. Before each of its collectives a rank with inputs announces it; ranks
/// without inputs take part in the announcements, learn from them what comes, and go along.
///
/// An announcement is one all-reduce (sum) of a few numbers, to which ranks without inputs give zeros.
class JoinSession {
 public:
  /// Events of no object in particular, for whoever calls a plain collective on the group.
  enum class Plain { kAllReduce, kAllGather };

  JoinSession(ProcessGroup group, std::vector<Joinable*> joinables, const JoinOptions& options);
  ~JoinSession();
  JoinSession(const JoinSession&) = delete;
  JoinSession& operator=(const JoinSession&) = delete;

  /// The session in which this rank runs its loop on `group`; null outside.
  static JoinSession* running(const ProcessGroup& group);
  static void announce_if_running(const ProcessGroup& group, Plain collective, const at::Tensor& tensor);

  /// This rank is about to call the collectives that object `index` knows as `event`.
  void announce(int index, int event);
  /// This rank is about to all-reduce or all-gather a tensor like this one, to which zeros are neutral.
  void announce(Plain collective, const at::Tensor& tensor);
  /// Ranks that had inputs at the last announcement. Waits for it.
  int active();
  const JoinOptions& options() const noexcept { return options_; }

  /// The lowest rank with inputs, agreed by all ranks in a collective.
  int first_active(bool this_rank_is) const;

  /// This rank has an input. A model whose parameters are all frozen announces nothing.
  void count_forward() noexcept { ++forwards_; }

  /// The rest of this rank's part, once its loop has ended. Returns a rank that had inputs to the last.
  int shadow_the_others();
  /// Ends the joinables' part: see Joinable::join_end().
  void end(int source);

 private:
  struct Message;
  void start(const Message& message);

  ProcessGroup group_;
  std::vector<Joinable*> joinables_;
  JoinOptions options_;
  bool in_loop_ = true;
  std::int64_t forwards_ = 0;
  at::Tensor last_;  ///< Of the last announcement.
  Work work_;
};

}  // namespace ddpkit
