#include <ddpkit/parallel/bucket_plan.h>

#include "support/catch.h"

using ddpkit::ParameterInfo;
using ddpkit::plan_buckets;
using Plan = std::vector<std::vector<std::size_t>>;

namespace {

ParameterInfo floats(std::size_t numel) { return {.numel = numel, .dtype = at::kFloat, .device = at::kCPU}; }

}  // namespace

TEST_CASE("buckets are filled from the last parameter", "[bucket_plan]") {
  CHECK(plan_buckets({floats(10), floats(10), floats(10), floats(10)}, 40, 80) == Plan{{3}, {2, 1}, {0}});
}

TEST_CASE("a bucket closes with the parameter that reaches its cap", "[bucket_plan]") {
  CHECK(plan_buckets({floats(5), floats(1000), floats(5)}, 40, 40) == Plan{{2, 1}, {0}});
}

TEST_CASE("one bucket when the caps are large", "[bucket_plan]") {
  CHECK(plan_buckets({floats(10), floats(10), floats(10)}, 1 << 20, 1 << 20) == Plan{{2, 1, 0}});
}

TEST_CASE("a bucket holds one dtype", "[bucket_plan]") {
  const ParameterInfo doubles{.numel = 10, .dtype = at::kDouble, .device = at::kCPU};
  CHECK(plan_buckets({floats(10), doubles, floats(10), doubles}, 1000, 1000) == Plan{{3, 1}, {2, 0}});
}

TEST_CASE("no parameters, no buckets", "[bucket_plan]") { CHECK(plan_buckets({}, 1, 1).empty()); }
