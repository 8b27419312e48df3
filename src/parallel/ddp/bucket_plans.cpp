#include "parallel/ddp/bucket_plans.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "parallel/ddp/debug.h"
#include "parallel/sharding/parameter_shards.h"

namespace ddpkit {

BucketPlan plan_in_order(const std::vector<NamedParameter>& parameters, const std::vector<std::size_t>& order,
                         std::size_t first_bucket_bytes, std::size_t bucket_bytes) {
  std::vector<ParameterInfo> infos;
  for (const std::size_t index : order) {
    const at::Tensor& tensor = parameters[index].tensor;
    infos.push_back(
        {.numel = static_cast<std::size_t>(tensor.numel()), .dtype = tensor.scalar_type(), .device = tensor.device()});
  }
  BucketPlan buckets = plan_buckets(infos, first_bucket_bytes, bucket_bytes);
  for (auto& members : buckets) {
    for (std::size_t& index : members) index = order[index];
  }
  return buckets;
}

std::vector<std::size_t> order_of(const BucketPlan& plan) {
  std::vector<std::size_t> order;
  for (const auto& members : plan) order.insert(order.end(), members.begin(), members.end());
  std::reverse(order.begin(), order.end());
  return order;
}

BucketPlan plan_blocks(const std::vector<NamedParameter>& parameters, const ParameterShards& shards) {
  std::map<std::pair<std::size_t, std::size_t>, std::vector<std::size_t>> members_of;  // [unit, block]
  for (std::size_t i = 0; i < parameters.size(); ++i) members_of[shards.block_of(parameters[i].tensor)].push_back(i);
  BucketPlan buckets;
  for (auto& [block, members] : members_of) buckets.push_back(std::move(members));
  std::stable_sort(buckets.begin(), buckets.end(), [](const auto& a, const auto& b) { return a.front() > b.front(); });
  return buckets;
}

std::vector<FlatLayout> layouts_of(const std::vector<NamedParameter>& parameters, const BucketPlan& plan, int ranks) {
  std::vector<FlatLayout> layouts;
  for (const auto& members : plan) {
    std::vector<std::int64_t> numels;
    for (const std::size_t index : members) numels.push_back(parameters[index].tensor.numel());
    layouts.push_back(make_flat_layout(std::move(numels), parameters[members[0]].tensor.element_size(), ranks));
  }
  return layouts;
}

void log_plan(const ProcessGroup& group, const char* what, const BucketPlan& plan,
              const std::vector<NamedParameter>& parameters) {
  if (debug_level() < DebugLevel::kInfo || group.rank() != 0) return;
  const auto sparse = std::count_if(parameters.begin(), parameters.end(), [](const auto& one) { return one.sparse; });
  debug_line(group, fmt::format("{}: {} for {} dense parameters, {} sparse ones beside", what, plan.size(),
                                static_cast<std::ptrdiff_t>(parameters.size()) - sparse, sparse));
  for (std::size_t b = 0; b < plan.size(); ++b) {
    std::size_t bytes = 0;
    std::vector<std::string> names;
    for (const std::size_t index : plan[b]) {
      bytes += parameters[index].tensor.nbytes();
      names.push_back(parameters[index].name);
    }
    debug_line(group,
               fmt::format("  bucket {}: {} bytes, {} parameters: {}", b, bytes, names.size(), fmt::join(names, ", ")));
  }
}

}  // namespace ddpkit
