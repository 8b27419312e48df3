// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/shm/control.h"
#include "comm/shm/operation.h"
#include "comm/shm/peers.h"

namespace ddpkit::shm {

/// Precedes the bytes of a message in a channel.
struct MessageHeader {
  std::uint64_t bytes;
  std::uint64_t numel;
  std::int32_t tag;
  std::uint8_t dtype;
};

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
/// The engine holds its mutex during each call.
class Mailbox {
 public:
  /// `due` receives the callbacks and deleters of complete messages.
  Mailbox(const Peers& peers, std::vector<Due>& due);
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  void post(MessageHandle message);
  bool idle() const noexcept { return receives_.empty() && sending_ == 0; }

  /// Makes progress as far as the peers allow, and wakes the peers that may continue. Throws CollectiveMismatch if a
  /// message has another size or type than its receive.
  bool progress();

 private:
  struct Arrived {
    MessageHeader header;
    std::vector<std::byte> data;
  };
  struct Incoming {
    std::optional<MessageHeader> header;  ///< Header of the message in progress; its bytes follow.
    std::size_t done = 0;
    MessageHandle receive;          ///< Target of the message; null: the message goes to `unexpected`.
    std::list<Arrived> unexpected;  ///< Complete unexpected messages.
    std::vector<std::byte> buffer;
  };

  bool push(int peer);
  bool pull(int peer);
  bool wanted(int peer) const;
  MessageHandle take_match(int peer, const MessageHeader& header);
  void check(const Message& receive, int peer, const MessageHeader& header) const;
  bool take_early(const MessageHandle& handle);

  void complete(const MessageHandle& message) { shm::complete(message, message->on_finish, message->keep_alive, due_); }

  const Peers& peers_;
  std::vector<Due>& due_;
  std::vector<ChannelBlock*> channels_;          ///< channels_[r][p] is the channel from rank r to rank p.
  std::vector<std::list<MessageHandle>> sends_;  ///< [peer]
  std::size_t sending_ = 0;
  std::list<MessageHandle> receives_;
  std::vector<Incoming> incoming_;  ///< [peer]
};

}  // namespace ddpkit::shm
