// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/shm/control.h"
#include "kernels/dtype.h"

namespace ddpkit::shm {

using kernels::DataType;

/// Precedes the bytes of a message in a channel.
struct MessageHeader {
  std::uint64_t bytes;
  std::uint64_t numel;
  std::int32_t tag;
  std::uint8_t dtype;
};

struct Message;

/// An operation that can be waited for.
struct Pending {
  explicit Pending(const Message* as_message = nullptr) : message(as_message) {}
  const Message* message;  ///< This object if it is a message, otherwise null.
  bool over = false;       ///< Complete except for on_finish.
  bool finished = false;
  std::exception_ptr failure = nullptr;  ///< Exception of on_finish. Only this operation has failed, not the group.

  void throw_if_failed() const {
    if (failure) std::rethrow_exception(failure);
  }
};
using PendingHandle = std::shared_ptr<Pending>;

/// A send or a receive in progress.
struct Message : Pending {
  Message() : Pending(this) {}
  enum class Kind { kSend, kReceive };

  Kind kind = Kind::kSend;
  int peer = 0;  ///< kAnySource: the rank that sends first; later that rank.
  int tag = 0;
  DataType dtype = DataType::kUInt8;
  std::size_t numel = 0;
  std::byte* data = nullptr;  ///< numel elements, dense.
  std::shared_ptr<void> keep_alive = {};
  std::function<void()> on_finish = {};

  std::size_t done = 0;  ///< Bytes of header and data that were written to or read from the channel.
  bool matched = false;  ///< For a receive: its message has started to arrive.

  std::size_t bytes() const { return numel * size_of(dtype); }
};
using MessageHandle = std::shared_ptr<Message>;

inline constexpr int kAnySource = -1;

/// Returns text such as "recv of 10 float32 from rank 1 (tag 0)".
std::string describe(const Message& message);

/// The messages of one rank: a queue of sends per peer, receives in the order of their posts, and unexpected messages.
/// The engine calls it and holds its mutex.
class Mailbox {
 public:
  /// `channels[r]` points to the channels from rank r; channels[r][p] is the one to rank p.
  Mailbox(int rank, std::vector<ChannelBlock*> channels);

  void post(MessageHandle message);
  bool idle() const noexcept { return receives_.empty() && sending_ == 0; }

  /// Makes progress as far as the peers allow. Calls `ring(peer)` for each peer that may continue. Throws
  /// CollectiveMismatch if a message has another size or type than its receive.
  bool progress(const std::function<void(int peer)>& ring);
  /// Passes the messages that are complete except for their `on_finish` to `take`.
  template <class Take>
  void take_finished(const Take& take) {
    for (const MessageHandle& message : finished_) take(message);
    finished_.clear();
  }

 private:
  struct Arrived {
    MessageHeader header;
    std::vector<std::byte> data;
  };
  struct Incoming {
    std::optional<MessageHeader> header;  ///< Header of the message in progress; its bytes follow.
    std::size_t done = 0;
    MessageHandle receive;     ///< Target of the message; null: the message goes to `early`.
    std::list<Arrived> early;  ///< Complete unexpected messages.
    std::vector<std::byte> buffer;
  };

  bool push(int peer);
  bool pull(int peer);
  bool wanted(int peer) const;
  MessageHandle take_match(int peer, const MessageHeader& header);
  void check(const Message& receive, int peer, const MessageHeader& header) const;
  bool take_early(const MessageHandle& handle);

  int rank_;
  std::vector<ChannelBlock*> channels_;          ///< [from rank]
  std::vector<std::list<MessageHandle>> sends_;  ///< [peer]
  std::size_t sending_ = 0;
  std::list<MessageHandle> receives_;
  std::vector<Incoming> incoming_;  ///< [peer]
  std::vector<MessageHandle> finished_;
};

}  // namespace ddpkit::shm
