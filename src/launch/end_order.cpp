#include "launch/end_order.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include <ddpkit/error.h>

namespace ddpkit::launch {

EndOrder::EndOrder() : fd_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (fd_ < 0) throw Error(fmt::format("no epoll descriptor: {}", std::strerror(errno)));
}

EndOrder::~EndOrder() { ::close(fd_); }

void EndOrder::add(int pidfd, std::size_t rank) {
  if (pidfd < 0) return;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = rank;
  if (::epoll_ctl(fd_, EPOLL_CTL_ADD, pidfd, &event) != 0)
    throw Error(fmt::format("cannot watch the process of rank {}: {}", rank, std::strerror(errno)));
  ++count_;
}

void EndOrder::remove(int pidfd) noexcept {
  if (pidfd >= 0 && ::epoll_ctl(fd_, EPOLL_CTL_DEL, pidfd, nullptr) == 0) --count_;
}

std::vector<std::size_t> EndOrder::ended() const {
  // epoll returns descriptors in the order in which they became readable.
  std::vector<epoll_event> events(count_ + 1);
  const int found = ::epoll_wait(fd_, events.data(), static_cast<int>(events.size()), 0);
  std::vector<std::size_t> ranks;
  for (int i = 0; i < found; ++i)
    ranks.push_back(static_cast<std::size_t>(events[static_cast<std::size_t>(i)].data.u64));
  return ranks;
}

}  // namespace ddpkit::launch
