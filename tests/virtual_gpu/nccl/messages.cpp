// Sends and receives: each pair of ranks has a mailbox per direction.
#include <algorithm>
#include <cstring>

#include "virtual_gpu/nccl/communicator.h"

namespace vgpu::nccl {
namespace {

bool is_done(const Message& message) { return message.done == message.bytes; }

/// Messages between two ranks in one direction arrive in the order of the calls.
bool must_wait(const std::vector<Message>& messages, std::size_t index) {
  const Message& message = messages[index];
  return std::any_of(messages.begin(), messages.begin() + static_cast<std::ptrdiff_t>(index),
                     [&](const Message& other) {
                       return !is_done(other) && other.is_send == message.is_send && other.peer == message.peer &&
                              other.communicator == message.communicator;
                     });
}

/// Returns true if bytes were moved.
bool progress(Message& message) {
  Communicator& c = *message.communicator;
  Mail& mail = message.is_send ? c.mail(c.rank(), message.peer) : c.mail(message.peer, c.rank());
  const std::size_t ready = mail.bytes.load(std::memory_order_acquire);
  if (message.is_send != (ready == 0)) return false;
  if (message.is_send) {
    const std::size_t bytes = std::min(kMailBytes, message.bytes - message.done);
    std::memcpy(mail.data, message.data + message.done, bytes);
    mail.bytes.store(static_cast<std::uint32_t>(bytes), std::memory_order_release);
    message.done += bytes;
  } else {
    std::memcpy(message.data + message.done, mail.data, ready);
    mail.bytes.store(0, std::memory_order_release);
    message.done += ready;
  }
  return true;
}

}  // namespace

void run_messages(std::vector<Message> messages) {
  Backoff backoff;
  while (!std::all_of(messages.begin(), messages.end(), is_done)) {
    bool moved = false;
    for (std::size_t i = 0; i < messages.size(); ++i) {
      if (messages[i].communicator->aborted() || devices_are_lost()) return;
      if (!is_done(messages[i]) && !must_wait(messages, i)) moved = progress(messages[i]) || moved;
    }
    if (moved) {
      backoff = {};
    } else {
      backoff.pause();
    }
  }
}

}  // namespace vgpu::nccl
