#include "parallel/dp/replica_streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "tensor/stream_set.h"

namespace ddpkit {

ReplicaStreams::ReplicaStreams(const std::vector<c10::Device>& devices) {
  if (devices[0].is_cpu()) return;
  devices_ = devices;
  const c10::impl::VirtualGuardImpl device(devices_[0].type());
  for (std::size_t r = 0; r < devices_.size(); ++r) {
    first_.push_back(
        static_cast<std::size_t>(std::find(devices_.begin(), devices_.end(), devices_[r]) - devices_.begin()));
    caller_.push_back(current(devices_[r]));
    const bool shares = first_[r] != r;
    stream_.push_back(shares ? device.getStreamFromGlobalPool(devices_[r]) : caller_[r]);
    side_.push_back(shares ? side_[first_[r]] : device.getStreamFromGlobalPool(devices_[r], /*isHighPriority=*/true));
    if (!shares) sides_.push_back(side_[r]);
  }
}

c10::Stream ReplicaStreams::current(c10::Device device) const {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void ReplicaStreams::fork() {
  for (std::size_t r = 0; r < devices_.size(); ++r) {
    caller_[r] = current(devices_[r]);
    if (first_[r] == r) stream_[r] = caller_[r];
  }
  begin();
}

void ReplicaStreams::begin() const {
  for (std::size_t r = 0; r < devices_.size(); ++r)
    stream_waits(stream_[r], caller_[r]);  // For the weights, the batch and the outputs' gradients.
}

void ReplicaStreams::join() const {
  for (std::size_t r = 0; r < devices_.size(); ++r) {
    stream_waits(caller_[r], stream_[r]);  // Outputs and losses are complete, and the batch is no longer read.
    if (first_[r] == r) stream_waits(caller_[r], side_[r]);  // Sums are complete, summed gradients unused.
  }
}

ReplicaStreams::Scope::Scope(const ReplicaStreams& streams, std::size_t replica) {
  if (!streams.used()) return;
  std::vector<c10::Stream> currents;
  for (std::size_t r = 0; r < streams.devices_.size(); ++r) {
    if (streams.first_[r] != r) continue;
    currents.push_back(streams.first_[replica] == r ? streams.stream_[replica] : streams.caller_[r]);
  }
  streams_.emplace(currents);
  device_.emplace(streams.devices_[replica]);
}

ReplicaStreams::CallerScope::CallerScope(const ReplicaStreams& streams) {
  if (!streams.used()) return;
  for (std::size_t r = 0; r < streams.devices_.size(); ++r) {
    if (streams.first_[r] != r) continue;
    outside_.push_back(streams.current(streams.devices_[r]));
    inside_.push_back(streams.caller_[r]);
    stream_waits(inside_.back(), outside_.back());  // For incoming gradients.
  }
  guard_.emplace(inside_);
}

ReplicaStreams::CallerScope::~CallerScope() noexcept(false) {
  for (std::size_t i = 0; i < inside_.size(); ++i) stream_waits(outside_[i], inside_[i]);  // For outgoing gradients.
}

}  // namespace ddpkit
