#include <ddpkit/train/run_options.h>

#include <filesystem>

#include <fmt/format.h>

#include <ddpkit/comm/environment.h>
#include <ddpkit/comm/process_group.h>
#include <ddpkit/train/text.h>
#include <ddpkit/train/together.h>

namespace ddpkit::train {

void declare(Options& options, RunOptions& run) {
  using optim::LearningRateScaling;
  options.section("training");
  options.add("epochs", &run.epochs, "Passes over the training set").at_least(1).also("max_epochs").may_differ();
  options.add("batch_size", &run.batch_size, "Samples per batch on each device").at_least(1);
  options.add("lr", &run.lr, "Learning rate").above(0);
  options.add("lr_scaling", &run.lr_scaling,
              {{"none", LearningRateScaling::kNone},
               {"linear", LearningRateScaling::kLinear},
               {"sqrt", LearningRateScaling::kSquareRoot}},
              "Scaling of the learning rate with the number of devices: none, linear or sqrt");
  options.add("lr_schedule", &run.lr_schedule, "cosine (down to 0 at the end) or constant")
      .one_of({"cosine", "constant"})
      .also("schedule");
  options.add("warmup_epochs", &run.warmup_epochs, "Epochs of learning rate warm-up").between(0, 1e6);
  options.add("weight_decay", &run.weight_decay, "Weight decay").between(0, 1);
  options.add("max_grad_norm", &run.max_grad_norm, "Clip the norm of the gradients to X; 0: no limit")
      .at_least(0)
      .also("clip_norm");
  options.add("grad_accum_steps", &run.grad_accum_steps, "Batches per device and update")
      .between(1, 1e6)
      .also("gradient_accumulation_steps");
  options
      .add("amp", &run.amp,
           "Mixed precision, if the device supports it efficiently: GPUs, and CPUs with bfloat16 matrix units")
      .may_differ();
  options.add("seed", &run.seed, "The same seed gives the same weights");
  options.add("max_steps", &run.max_steps, "Stop after N updates").at_least(1).may_differ();

  options.section("data");
  options.add("num_workers", &run.num_workers, "Threads per rank that prepare batches")
      .between(0, 256)
      .also("workers")
      .may_differ();

  options.section("distributed");
  options
      .add("backend", &run.backend,
           {{"auto", ""}, {"shm", "shm"}, {"gloo", "gloo"}, {"nccl", "nccl"}, {"hierarchical", "hierarchical"}},
           "shm, gloo, nccl, hierarchical, or auto: by device and hosts")
      .may_differ();
  options.add("sync_batchnorm", &run.sync_batchnorm, "Synchronize batch norm over all ranks").also("sync_batch_norm");
  declare(options, run.launch);
  options
      .add("elastic", &run.elastic,
           "Continue without a lost rank, on one host; start the ranks with --nproc-per-node, or with ddpkit run "
           "--min-ranks")
      .may_differ();
  options.add("min_ranks", &run.min_ranks, "With --elastic: fail with fewer ranks")
      .between(1, 4096)
      .needs("elastic")
      .may_differ();
  options
      .add("max_replacements", &run.max_replacements,
           "With --elastic and --nproc-per-node: start a new process for a lost rank, at most this often")
      .between(0, 1000000)
      .needs("elastic")
      .may_differ();

  options.section("run");
  options.add("save", &run.save, "Write checkpoints, records and pictures into the run folder").may_differ();
  options.add("save_dir", &run.save_dir, "Run folder; by default a new folder checkpoints/PROGRAM/run-N").may_differ();
  options.add("save_steps", &run.save_steps, "Also save a checkpoint every N updates; 0: only after each epoch")
      .at_least(0)
      .also("checkpoint_steps")
      .may_differ();
  options.add("save_total_limit", &run.save_total_limit, "Keep the last N checkpoints")
      .at_least(1)
      .also("keep_checkpoints")
      .may_differ();
  options.add("resume", &run.resume, "Fail if there is no run in save_dir; without save_dir, resume the last run")
      .may_differ();
  options.add("overwrite", &run.overwrite, "Replace the run in save_dir, except what a restarted job wrote")
      .excludes("resume")
      .may_differ();
  options.add("tensorboard", &run.tensorboard, "Write TensorBoard events to SAVE_DIR/logs").may_differ();
  options.add("logging_steps", &run.logging_steps, "Print the loss every N updates; 0: never")
      .at_least(0)
      .also("log_steps")
      .may_differ();
  options
      .add("profile", &run.profile,
           "Time the phases of updates 11 to 30; write SAVE_DIR/trace.json of all ranks for ui.perfetto.dev")
      .may_differ();
  options.add("json", &run.json, "Print one line of JSON per epoch; the last line, the result, is text").may_differ();
  options
      .add("progress", &run.progress, "bar (on a terminal), lines (elsewhere), off, or auto: both, lines not with json")
      .one_of({"auto", "bar", "lines", "off"})
      .may_differ();
}

std::string data_folder(const std::string& named, const std::string& standard,
                        const std::function<void(const std::string& folder)>& generate, const ProcessGroup& group) {
  if (!named.empty()) return named;
  run_together(group, [&] {
    if (read_launch_environment().local_rank != 0 || std::filesystem::exists(standard)) return;
    if (group.rank() == 0)
      log_line(fmt::format("--data is not given and there is no {}: generating a synthetic data set there", standard));
    generate(standard);
  });
  return standard;
}

}  // namespace ddpkit::train
