#include <ddpkit/parallel/bucket_plan.h>

#include <algorithm>
#include <map>
#include <utility>

namespace ddpkit {

BucketPlan plan_buckets(const std::vector<ParameterInfo>& parameters, std::size_t first_bucket_bytes,
                        std::size_t bucket_bytes) {
  struct Open {
    std::vector<std::size_t> members;
    std::size_t bytes = 0;
    std::size_t cap = 0;
  };
  const auto key_of = [](const ParameterInfo& info) {
    return std::tuple(info.device.type(), info.device.index(), info.dtype);
  };
  std::map<decltype(key_of(parameters[0])), Open> open;
  BucketPlan buckets;
  for (std::size_t i = parameters.size(); i-- > 0;) {
    const auto [entry, is_new] = open.try_emplace(key_of(parameters[i]));
    Open& bucket = entry->second;
    if (is_new) bucket.cap = first_bucket_bytes;
    bucket.members.push_back(i);
    bucket.bytes += parameters[i].bytes();
    if (bucket.bytes >= bucket.cap) {
      buckets.push_back(std::move(bucket.members));
      bucket = {{}, 0, bucket_bytes};
    }
  }
  for (auto& [key, bucket] : open) {
    if (!bucket.members.empty()) buckets.push_back(std::move(bucket.members));
  }
  // The last gradient of a bucket is that of its smallest index.
  std::stable_sort(buckets.begin(), buckets.end(), [](const auto& a, const auto& b) { return a.back() > b.back(); });
  return buckets;
}

}  // namespace ddpkit
