#include "parallel/ddp/shard_output.h"

#include "parallel/ddp/reducer.h"

namespace ddpkit {

const std::vector<NamedParameter>& parameters_of(const Reducer& reducer) {
  return Reducer::Impl::of(reducer).parameters();
}

std::shared_ptr<ParameterShards> parameter_shards_of(const Reducer& reducer) {
  return Reducer::Impl::of(reducer).parameter_shards();
}

const ProcessGroup& shard_group_of(const Reducer& reducer) { return Reducer::Impl::of(reducer).shard_group(); }

void ShardOutput::make_plan(const Reducer& reducer) { Reducer::Impl::of(reducer).plan_shards(*this); }
void ShardOutput::attach(const std::shared_ptr<ShardOutput>& output, const Reducer& reducer) {
  Reducer::Impl::of(reducer).set_shard_output(output);
}

}  // namespace ddpkit
