// The wait for a collective of gloo.
#include <chrono>
#include <stdexcept>

#include "comm/backends/gloo_work.h"
#include "support/catch.h"

namespace {

/// Ends after the first wait() has ended without it.
class LateWork final : public c10d::Work {
 public:
  explicit LateWork(std::exception_ptr error) : error_(std::move(error)) {}
  bool wait(std::chrono::milliseconds timeout) override {
    if (isCompleted()) return c10d::Work::wait(timeout);
    finish(error_);
    throw std::runtime_error("Operation timed out!");
  }

 private:
  const std::exception_ptr error_;
};

ddpkit::GlooWork late_work(std::exception_ptr error = nullptr) {
  return {c10::make_intrusive<LateWork>(std::move(error)), /*rank=*/0, [] { return false; }};
}

}  // namespace

TEST_CASE("a collective of gloo that ends as a part of the wait ends has succeeded", "[gloo]") {
  for (const std::chrono::milliseconds timeout : {kNoTimeout, std::chrono::milliseconds(60000)})
    CHECK(late_work().wait(timeout));
}

TEST_CASE("a collective of gloo that fails as a part of the wait ends has its own error", "[gloo]") {
  CHECK_THROWS_WITH(late_work(std::make_exception_ptr(std::runtime_error("no such luck"))).wait(kNoTimeout),
                    "no such luck");
}
