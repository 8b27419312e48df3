// Tier 1.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/join.h>

namespace ddpkit {

/// Events of DistributedDataParallel within join().
enum JoinEvent : int { kJoinBuffers, kJoinBucket, kJoinEndOfBackward };

/// Communication between the ranks of a join(). A rank with inputs notifies the others before each of its collectives.
/// Ranks without inputs receive the notifications and make matching calls.
///
/// A notification is one all-reduce (sum) of a few numbers. Ranks without inputs contribute zeros.
class JoinContext {
 public:
  /// Events for plain collectives on the group, without an object.
  enum class Plain { kAllReduce, kAllGather };

  JoinContext(ProcessGroup group, std::vector<Joinable*> joinables, const JoinOptions& options);
  ~JoinContext();
  JoinContext(const JoinContext&) = delete;
  JoinContext& operator=(const JoinContext&) = delete;

  /// Returns the context in which this rank runs its loop on `group`; null outside a loop.
  static JoinContext* running(const ProcessGroup& group);
  /// Returns the context of an object that was passed to join(), until Joinable::join_end(). Null for other objects.
  static JoinContext* of(const Joinable& joinable);

  /// Call before the collectives of `joinable` for `event`.
  void notify(const Joinable& joinable, int event);
  /// Call before an all-reduce or all-gather of a tensor like this one, within or outside join(). Zeros must be neutral
  /// for the tensor.
  static void notify(const ProcessGroup& group, Plain collective, const at::Tensor& tensor);
  /// Returns the number of ranks that had inputs at the last notification. Waits for it.
  int active();
  const JoinOptions& options() const noexcept { return options_; }

  /// Returns the lowest rank with inputs. Collective.
  int first_active(bool this_rank_is) const;

  /// Counts an input of this rank. A model with only frozen parameters announces nothing.
  void count_forward() noexcept { ++forwards_; }

  /// Takes part in the others' collectives after this rank's loop has ended. Returns a rank that had inputs until the
  /// end.
  int shadow_the_others();
  /// Ends the context of the joinables: see Joinable::join_end().
  void end(int source);

 private:
  struct Message;
  void start(const Message& message);
  std::size_t index_of(const Joinable& joinable) const;

  ProcessGroup group_;
  std::vector<Joinable*> joinables_;
  JoinOptions options_;
  bool in_loop_ = true;
  std::int64_t forwards_ = 0;
  at::Tensor last_;  ///< The last notification.
  Work work_;
};

}  // namespace ddpkit
