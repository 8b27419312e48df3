#include "tensor/stream_set.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace ddpkit {

void stream_waits(const c10::Stream& waiter, const c10::Stream& of) {
  if (waiter == of) return;
  // An event without timing costs the device almost nothing. It may go out of scope immediately: the device keeps it.
  c10::Event reached(of.device_type());
  reached.record(of);
  reached.block(waiter);
}

StreamSet::StreamSet(c10::Device device) : device_(device), has_streams_(!device.is_cpu()) {}

std::optional<c10::Stream> StreamSet::current() const {
  if (!has_streams_) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

bool StreamSet::add_current() {
  if (!has_streams_) return false;
  const c10::Stream stream = *current();
  if (std::find(streams_.begin(), streams_.end(), stream) != streams_.end()) return false;
  streams_.push_back(stream);
  return true;
}

void StreamSet::current_waits() const {
  if (streams_.empty()) return;
  const c10::Stream waiter = *current();
  for (const c10::Stream& stream : streams_) stream_waits(waiter, stream);
}

void StreamSet::keep_alive(const at::Tensor& tensor) const {
  for (const c10::Stream& stream : streams_) tensor.record_stream(stream);
}

}  // namespace ddpkit
