#include "comm/shm/mailbox.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include <ddpkit/error.h>

namespace ddpkit::shm {
namespace {

/// Copies to the ring as much as fits. Returns the number of bytes.
std::size_t write_some(ChannelBlock& channel, const std::byte* data, std::size_t bytes) {
  const std::uint64_t written = channel.written.load(std::memory_order_relaxed);
  const std::size_t room = kChannelBytes - static_cast<std::size_t>(written - channel.read.load());
  const std::size_t count = std::min(room, bytes);
  const std::size_t at = written % kChannelBytes;
  const std::size_t first = std::min(count, kChannelBytes - at);
  std::memcpy(channel.ring + at, data, first);
  std::memcpy(channel.ring, data + first, count - first);
  if (count != 0) channel.written.exchange(written + count);
  return count;
}

/// Copies from the ring as much as is available. Returns the number of bytes.
std::size_t read_some(ChannelBlock& channel, std::byte* data, std::size_t bytes) {
  const std::uint64_t read = channel.read.load(std::memory_order_relaxed);
  const std::size_t there = static_cast<std::size_t>(channel.written.load() - read);
  const std::size_t count = std::min(there, bytes);
  const std::size_t at = read % kChannelBytes;
  const std::size_t first = std::min(count, kChannelBytes - at);
  std::memcpy(data, channel.ring + at, first);
  std::memcpy(data + first, channel.ring, count - first);
  if (count != 0) channel.read.exchange(read + count);
  return count;
}

MessageHeader header_of(const Message& message) {
  return {message.bytes(), message.numel, message.tag, static_cast<std::uint8_t>(message.dtype)};
}

}  // namespace

std::string describe(const Message& message) {
  const bool sends = message.kind == Message::Kind::kSend;
  const std::string peer = message.peer == kAnySource ? "any rank" : fmt::format("rank {}", message.peer);
  return fmt::format("{} of {} {} {} {} (tag {})", sends ? "send" : "recv", message.numel, name_of(message.dtype),
                     sends ? "to" : "from", peer, message.tag);
}

Mailbox::Mailbox(const Peers& peers, std::vector<Due>& due)
    : peers_(peers), due_(due), channels_(peers.channels()), sends_(channels_.size()), incoming_(channels_.size()) {}

void Mailbox::post(MessageHandle message) {
  if (message->kind == Message::Kind::kSend) {
    sends_[static_cast<std::size_t>(message->peer)].push_back(std::move(message));
    ++sending_;
  } else if (!take_early(message)) {
    receives_.push_back(std::move(message));
  }
}

/// Completes a receive from the messages that arrived before it was posted.
bool Mailbox::take_early(const MessageHandle& handle) {
  Message& receive = *handle;
  for (std::size_t p = 0; p < incoming_.size(); ++p) {
    if (receive.peer != kAnySource && receive.peer != static_cast<int>(p)) continue;
    auto& unexpected = incoming_[p].unexpected;
    const auto found = std::find_if(unexpected.begin(), unexpected.end(),
                                    [&](const Arrived& arrived) { return arrived.header.tag == receive.tag; });
    if (found == unexpected.end()) continue;
    check(receive, static_cast<int>(p), found->header);
    receive.peer = static_cast<int>(p);
    if (!found->data.empty()) std::memcpy(receive.data, found->data.data(), found->data.size());
    unexpected.erase(found);
    complete(handle);
    return true;
  }
  return false;
}

void Mailbox::check(const Message& receive, int peer, const MessageHeader& header) const {
  if (header.numel == receive.numel && header.dtype == static_cast<std::uint8_t>(receive.dtype)) return;
  throw CollectiveMismatch(
      fmt::format("rank {} sent {} {} (tag {}) to rank {}, which called {}", peer, header.numel,
                  name_of(static_cast<DataType>(header.dtype)), header.tag, peers_.rank(), describe(receive)),
      {.rank = peer, .call = "recv"});
}

MessageHandle Mailbox::take_match(int peer, const MessageHeader& header) {
  const auto found = std::find_if(receives_.begin(), receives_.end(), [&](const MessageHandle& receive) {
    return !receive->matched && (receive->peer == kAnySource || receive->peer == peer) && receive->tag == header.tag;
  });
  if (found == receives_.end()) return nullptr;
  check(**found, peer, header);
  (*found)->matched = true;
  (*found)->peer = peer;
  return *found;
}

/// Returns whether this peer's message could complete a posted receive. Only then are unexpected messages read. So the
/// channel limits a sender that runs ahead, and this rank's memory use is limited.
bool Mailbox::wanted(int peer) const {
  return std::any_of(receives_.begin(), receives_.end(), [&](const MessageHandle& receive) {
    return receive->peer == peer || receive->peer == kAnySource;
  });
}

bool Mailbox::push(int peer) {
  auto& queue = sends_[static_cast<std::size_t>(peer)];
  ChannelBlock& channel = channels_[static_cast<std::size_t>(peers_.rank())][peer];
  bool moved = false;
  while (!queue.empty()) {
    Message& message = *queue.front();
    const MessageHeader header = header_of(message);
    std::byte head[sizeof header];
    std::memcpy(head, &header, sizeof header);
    while (message.done < sizeof header + message.bytes()) {
      const bool in_header = message.done < sizeof header;
      const std::size_t count = in_header ? write_some(channel, head + message.done, sizeof header - message.done)
                                          : write_some(channel, message.data + (message.done - sizeof header),
                                                       sizeof header + message.bytes() - message.done);
      if (count == 0) return moved;
      message.done += count;
      moved = true;
    }
    const MessageHandle done = std::move(queue.front());
    queue.pop_front();
    --sending_;
    complete(done);
  }
  return moved;
}

bool Mailbox::pull(int peer) {
  Incoming& in = incoming_[static_cast<std::size_t>(peer)];
  ChannelBlock& channel = channels_[static_cast<std::size_t>(peer)][peers_.rank()];
  bool moved = false;
  while (in.header || wanted(peer)) {
    if (!in.header) {
      // A header is read only when all of it is available.
      if (channel.written.load() - channel.read.load() < sizeof(MessageHeader)) return moved;
      std::byte head[sizeof(MessageHeader)];
      read_some(channel, head, sizeof head);
      in.header.emplace();
      std::memcpy(&*in.header, head, sizeof head);
      in.done = 0;
      in.receive = take_match(peer, *in.header);
      if (!in.receive) in.buffer.resize(in.header->bytes);
      moved = true;
    }
    std::byte* target = in.receive ? in.receive->data : in.buffer.data();
    while (in.done < in.header->bytes) {
      const std::size_t count = read_some(channel, target + in.done, in.header->bytes - in.done);
      if (count == 0) return moved;
      in.done += count;
      moved = true;
    }
    if (in.receive) {
      const MessageHandle done = std::move(in.receive);
      receives_.remove(done);
      complete(done);
    } else {
      in.unexpected.push_back({*in.header, std::move(in.buffer)});
      in.buffer.clear();
      // A receive may have been posted while its message was read to the buffer.
      for (auto receive = receives_.begin(); receive != receives_.end();) {
        receive = !(*receive)->matched && take_early(*receive) ? receives_.erase(receive) : std::next(receive);
      }
    }
    in.receive = nullptr;
    in.header.reset();
  }
  return moved;
}

bool Mailbox::progress() {
  bool moved = false;
  for (std::size_t p = 0; p < channels_.size(); ++p) {
    const int peer = static_cast<int>(p);
    if (peer == peers_.rank()) continue;
    bool here = push(peer);
    here |= pull(peer);
    if (here) peers_.wake(peer);
    moved |= here;
  }
  return moved;
}

}  // namespace ddpkit::shm
