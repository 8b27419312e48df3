// Streams of a device that only logs its calls: the log shows the order in which work would run.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "parallel/dp/replica_streams.h"
#include "support/catch.h"
#include "tensor/stream_set.h"

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
std::vector<std::string> calls_made;
c10::StreamId current_stream = 0;   // The current stream of every device.
c10::StreamId streams_of_pool = 0;  // Ids start at 100.
int events = 0;

/// Returns "7" for the first device, "1:7" for the second.
std::string name_of(const c10::Stream& stream) {
  return stream.device_index() == 0 ? fmt::format("{}", stream.id())
                                    : fmt::format("{}:{}", int{stream.device_index()}, stream.id());
}

/// Reports no devices, so that autograd starts no thread for them.
struct WritingGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override { return device; }
  c10::Device getDevice() const override { return {kType, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return stream(current_stream, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream(100 + streams_of_pool++, device);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 0; }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(static_cast<std::uintptr_t>(++events));
    calls_made.push_back(fmt::format("{} records {}", name_of(stream), events));
  }
  void block(void* event, const c10::Stream& stream) const override {
    calls_made.push_back(fmt::format("{} waits for {}", name_of(stream), reinterpret_cast<std::uintptr_t>(event)));
  }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}

  static c10::Stream stream(c10::StreamId id, c10::Device device = {kType, 0}) {
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, WritingGuard)

std::vector<std::string> since_the_last_time() { return std::exchange(calls_made, {}); }

void begin_on(c10::StreamId stream) {
  current_stream = stream;
  streams_of_pool = 0;
  events = 0;
  calls_made.clear();
}

}  // namespace

TEST_CASE("a stream that waits for another is made to by an event of that one", "[streams]") {
  begin_on(0);
  ddpkit::stream_waits(WritingGuard::stream(1), WritingGuard::stream(2));
  CHECK(since_the_last_time() == std::vector<std::string>{"2 records 1", "1 waits for 1"});
  ddpkit::stream_waits(WritingGuard::stream(1), WritingGuard::stream(1));
  CHECK(since_the_last_time().empty());
}

TEST_CASE("the current stream waits for each other stream of a set once", "[streams]") {
  begin_on(3);
  ddpkit::StreamSet set(c10::Device(kType, 0));
  CHECK(set.has_streams());
  set.current_waits();
  CHECK(set.add_current());
  CHECK_FALSE(set.add_current());
  set.current_waits();
  CHECK(since_the_last_time().empty());  // A single stream needs no event.
  current_stream = 4;
  CHECK(set.add_current());
  current_stream = 5;
  set.current_waits();
  CHECK(since_the_last_time() ==
        std::vector<std::string>{"3 records 1", "5 waits for 1", "4 records 2", "5 waits for 2"});
  set.clear();
  set.current_waits();
  CHECK(since_the_last_time().empty());
}

TEST_CASE("the CPU has no streams", "[streams]") {
  begin_on(3);
  ddpkit::StreamSet set(c10::kCPU);
  CHECK_FALSE(set.has_streams());
  CHECK_FALSE(set.add_current());
  CHECK_FALSE(set.current().has_value());
  set.current_waits();
  CHECK(since_the_last_time().empty());
}

TEST_CASE("replicas compute after the caller, and the caller continues after them and their sums", "[streams]") {
  begin_on(7);
  // Two replicas on one device, one on another: 100 and 102 are side streams, 101 is the second replica's stream.
  const c10::Device first(kType, 0), second(kType, 1);
  ddpkit::ReplicaStreams streams({first, first, second});
  CHECK(streams.used());
  CHECK(streams.sides().size() == 2);
  CHECK(streams.side(0) == streams.side(1));
  CHECK(streams.side(2).device() == second);
  CHECK(since_the_last_time().empty());
  streams.fork();
  CHECK(since_the_last_time() == std::vector<std::string>{"7 records 1", "101 waits for 1"});
  streams.join();
  CHECK(since_the_last_time() == std::vector<std::string>{"100 records 2", "7 waits for 2", "101 records 3",
                                                          "7 waits for 3", "1:102 records 4", "1:7 waits for 4"});
  // The caller changes its stream: replicas follow.
  current_stream = 8;
  streams.fork();
  CHECK(since_the_last_time() == std::vector<std::string>{"8 records 5", "101 waits for 5"});
}

TEST_CASE("work of the caller's streams keeps its order if backward runs in another thread", "[streams]") {
  begin_on(7);
  const c10::Device first(kType, 0), second(kType, 1);
  ddpkit::ReplicaStreams streams({first, second});
  streams.fork();
  since_the_last_time();
  current_stream = 9;  // The current stream of the thread that runs backward.
  {
    const ddpkit::ReplicaStreams::CallerScope scope(streams);
    CHECK(since_the_last_time() ==
          std::vector<std::string>{"9 records 1", "7 waits for 1", "1:9 records 2", "1:7 waits for 2"});
  }
  CHECK(since_the_last_time() ==
        std::vector<std::string>{"7 records 3", "9 waits for 3", "1:7 records 4", "1:9 waits for 4"});
}
