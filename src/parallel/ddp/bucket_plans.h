// Tier 1: ATen/core/Tensor.h. The buckets of a reducer's parameters.
#pragma once

#include <cstddef>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/bucket_plan.h>

#include "tensor/flat_layout.h"

namespace ddpkit {

class ParameterShards;

/// `order`: the parameters, in reverse order of their gradients.
BucketPlan plan_in_order(const std::vector<NamedParameter>& parameters, const std::vector<std::size_t>& order,
                         std::size_t first_bucket_bytes, std::size_t bucket_bytes);

/// Returns the order for plan_in_order() that gives the same buckets.
std::vector<std::size_t> order_of(const BucketPlan& plan);

/// A bucket has the parameters of one block of a unit. Buckets are in the order of their last gradients.
BucketPlan plan_blocks(const std::vector<NamedParameter>& parameters, const ParameterShards& shards);

/// Returns the places of gradients in the flat tensor of each bucket. [bucket]
std::vector<FlatLayout> layouts_of(const std::vector<NamedParameter>& parameters, const BucketPlan& plan, int ranks);

/// For DDPKIT_DEBUG. The plan is equal on all ranks. `parameters`: dense ones come first.
void log_plan(const ProcessGroup& group, const char* what, const BucketPlan& plan,
              const std::vector<NamedParameter>& parameters);

}  // namespace ddpkit
