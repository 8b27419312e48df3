#include <ddpkit/train/stop_signal.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/comm/process_group.h>

namespace ddpkit::train {
namespace {

constexpr std::chrono::milliseconds kBetweenTalks(200);
constexpr int kNoted[] = {SIGINT, SIGTERM, SIGHUP};
constexpr std::size_t kAll = std::size(kNoted);

volatile sig_atomic_t received = 0;
volatile sig_atomic_t received_at_ms = 0;  ///< Milliseconds of a clock that wraps around.
struct sigaction before[kAll] {};

void note(int number) {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  const auto now_ms = static_cast<sig_atomic_t>((now.tv_sec % 100000) * 1000 + now.tv_nsec / 1000000);
  if (received != 0 && (now_ms - received_at_ms > 500 || now_ms < received_at_ms)) {
    ::signal(number, SIG_DFL);
    ::raise(number);
    return;
  }
  if (received != 0) return;
  received_at_ms = now_ms;
  received = number;
}

}  // namespace

StopSignal::StopSignal(const ProcessGroup& group)
    : group_(std::make_unique<ProcessGroup>(group)), last_talk_(std::chrono::steady_clock::now()) {
  received = 0;
  struct sigaction action {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
  for (std::size_t i = 0; i < kAll; ++i) {
    ::sigaction(kNoted[i], &action, &before[i]);
    // Under nohup, SIGHUP stays ignored.
    if (kNoted[i] == SIGHUP && before[i].sa_handler == SIG_IGN) ::sigaction(SIGHUP, &before[i], nullptr);
  }
}

StopSignal::~StopSignal() {
  for (std::size_t i = 0; i < kAll; ++i) ::sigaction(kNoted[i], &before[i], nullptr);
}

bool StopSignal::requested() {
  if (agreed_ != 0) return true;
  if (group_->world_size() == 1) {
    agreed_ = received;
    return agreed_ != 0;
  }
  // A new rank has made no calls.
  if (std::exchange(generation_, group_->generation()) != group_->generation()) calls_left_ = 0;
  if (calls_left_-- > 0) return false;
  const auto now = std::chrono::steady_clock::now();
  // At most doubles the interval: one slow or fast step must not delay the next exchange by much.
  const auto spent = std::max<std::chrono::nanoseconds>(now - last_talk_, std::chrono::microseconds(1));
  const double wanted = static_cast<double>(interval_) * std::chrono::duration<double>(kBetweenTalks) / spent;
  interval_ = std::clamp<std::int64_t>(static_cast<std::int64_t>(wanted), 1, 2 * interval_);
  last_talk_ = now;
  const at::Tensor talk =
      at::tensor({static_cast<std::int64_t>(received), group_->rank() == 0 ? interval_ : std::int64_t{0}}, at::kLong)
          .to(group_->device());
  group_->all_reduce(talk, ReduceOp::kMax);
  const at::Tensor agreed = talk.cpu();
  group_->check();
  agreed_ = static_cast<int>(agreed.const_data_ptr<std::int64_t>()[0]);
  interval_ = agreed.const_data_ptr<std::int64_t>()[1];
  calls_left_ = interval_ - 1;
  return agreed_ != 0;
}

std::string StopSignal::describe(std::int64_t step, const std::string& save_dir) const {
  const char* name = ::sigabbrev_np(agreed_);
  return fmt::format("stopped by SIG{} after step {}; {}", name ? name : "?", step,
                     save_dir.empty() ? "no checkpoint was saved" : "resume with --save-dir " + save_dir);
}

}  // namespace ddpkit::train
