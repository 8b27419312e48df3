// Tier 2: everything of ddpkit::ddpkit. Include the single headers where compile time matters.
#pragma once

#include <ddpkit/comm/arena_stats.h>
#include <ddpkit/comm/environment.h>
#include <ddpkit/comm/error.h>
#include <ddpkit/comm/local_launch.h>
#include <ddpkit/comm/process_group.h>
#include <ddpkit/comm/shm_backend.h>
#include <ddpkit/data/distributed_sampler.h>
#include <ddpkit/optim/clip_grad_norm.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_optimizer.h>
#include <ddpkit/optim/fused_sgd.h>
#include <ddpkit/optim/grad_scaler.h>
#include <ddpkit/optim/learning_rate.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/parallel/bucket_plan.h>
#include <ddpkit/parallel/comm_hook.h>
#include <ddpkit/parallel/comm_hooks.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/parallel/join.h>
#include <ddpkit/parallel/outputs.h>
#include <ddpkit/parallel/power_sgd.h>
#include <ddpkit/parallel/reducer.h>
#include <ddpkit/parallel/stats.h>
#include <ddpkit/parallel/sync_batch_norm.h>
#include <ddpkit/parallel/timeline.h>
