// Run with RunOptions::elastic on nccl: a new process joins the others instead of a lost rank.
#include "gpu/gpu.h"
#include "ranks/run_join.h"

TEST_CASE("a rank of a run that new ranks join", "[.worker]") { ddpkit::testing::run_join_worker(); }

TEST_CASE("a run on 3 GPUs that a new rank joins ends as one that resumes with that rank", "[gpu]") {
  NEEDS_GPUS(3);
  ddpkit::testing::check_joined_run("nccl");
}
