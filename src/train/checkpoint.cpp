#include <ddpkit/train/checkpoint.h>

#include <c10/util/ScopeExit.h>
#include <sys/resource.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/train/text.h>
#include <ddpkit/train/together.h>

#include "parallel/sharding/parameter_shards.h"
#include "train/checkpoint_archive.h"
#include "train/checkpoint_files.h"
#include "train/checkpoint_shards.h"
#include "train/rank_state.h"
#include "train/sealed_file.h"

namespace ddpkit::train {
namespace {

constexpr const char* kWhat = "checkpoint";

// Collects what rank 0 needs from all ranks before it can write. Collective. [rank]
std::vector<std::string> prepare(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer,
                                 const std::vector<CheckpointPart>& parts, const ProcessGroup& group,
                                 bool check_parameters) {
  if (const auto* sharded = dynamic_cast<const optim::ShardedOptimizerBase*>(&optimizer)) sharded->consolidate_state();
  return gather_rank_states(module, parts, group, check_parameters);
}

}  // namespace

void write_checkpoint(const std::filesystem::path& path, const torch::nn::Module& module,
                      const torch::optim::Optimizer& optimizer, const CheckpointInfo& info,
                      const std::vector<CheckpointPart>& parts) {
  write_checkpoint_files({.path = path}, [&](const Sink& sink) {
    write_archive(sink, module, optimizer, info, parts, {rank_state(module, parts, /*with_buffers=*/false)});
  });
}

void save_checkpoint(const std::filesystem::path& path, const torch::nn::Module& module,
                     const torch::optim::Optimizer& optimizer, const CheckpointInfo& info, const ProcessGroup& group,
                     const std::vector<CheckpointPart>& parts) {
  Checkpoint(path, group, {.asynchronous = false}).save(module, optimizer, info, parts);
}

CheckpointInfo read_checkpoint(const std::filesystem::path& path, torch::nn::Module& module,
                               torch::optim::Optimizer& optimizer, const std::vector<CheckpointPart>& parts) {
  const std::string bytes = read_file_bytes(path, kWhat);
  return read_archive(path.string(), bytes, module, optimizer, parts, 0, 1)();
}

CheckpointInfo load_checkpoint(const std::filesystem::path& path, torch::nn::Module& module,
                               torch::optim::Optimizer& optimizer, const ProcessGroup& group,
                               const std::vector<CheckpointPart>& parts) {
  std::string bytes;
  run_together(group, [&] {
    if (group.rank() == 0) bytes = read_file_bytes(path, kWhat);
  });
  bytes = broadcast_bytes(group, std::move(bytes));
  // A file of an unsharded run has whole parameters.
  ParameterShards* shards = parameter_shards_of(optimizer);
  if (shards && (!shards_of_archive(path.string(), bytes).empty() || !shards->try_release())) shards = nullptr;
  if (shards) shards->enter();
  const auto leave = c10::make_scope_exit([&] {
    if (shards) shards->leave();
  });
  CheckpointInfo info;
  std::function<CheckpointInfo()> put;
  run_together(group, [&] {
    put = read_archive(path.string(), bytes, module, optimizer, parts, group.rank(), group.world_size());
  });
  run_together(group, [&] { info = put(); });
  return info;
}

CheckpointInfo read_checkpoint_info(const std::filesystem::path& path) {
  return info_of_archive(path.string(), read_file_bytes(path, kWhat));
}

/// The file in progress and its result.
struct Checkpoint::Writer {
  std::thread thread;
  std::exception_ptr failure;
  std::string bytes;  ///< Content of the file. Kept: allocation of new memory costs as much as the copy.

  /// Waits for the current write. Throws its error.
  void finish() {
    if (thread.joinable()) thread.join();
    if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
  }
};

Checkpoint::Checkpoint(std::filesystem::path path, const ProcessGroup& group, CheckpointOptions options)
    : path_(std::move(path)),
      group_(std::make_unique<ProcessGroup>(group)),
      options_(std::move(options)),
      writer_(std::make_unique<Writer>()) {
  if (options_.keep < 1) throw InvalidArgument(fmt::format("{} checkpoints are to be kept: at least 1", options_.keep));
}

Checkpoint::~Checkpoint() {
  try {
    writer_->finish();
  } catch (const std::exception& error) {
    log_line(error.what());
  }
}

void Checkpoint::save(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer,
                      const CheckpointInfo& info, const std::vector<CheckpointPart>& parts, bool is_best) {
  CheckpointFiles files{.path = path_, .keep = options_.keep, .step = info.step};
  if (is_best) {
    files.best = path_.parent_path() / options_.best_name;
    files.best_epoch_stem = options_.best_epoch_stem;
    files.best_epoch = info.epoch - 1;
  }
  if (options_.sharded) {
    const std::vector<std::string> shards = write_shards(path_, module, optimizer, info.step, *group_);
    const std::vector<std::string> states = gather_rank_states(module, parts, *group_, /*check_parameters=*/false);
    run_together(*group_, [&] {
      if (group_->rank() != 0) return;
      // All shards are on the disk: now the index replaces the one of the previous checkpoint.
      write_checkpoint_files(
          files, [&](const Sink& sink) { write_index(sink, module, optimizer, info, parts, states, shards); });
      remove_other_shards(path_, shards_beside(path_, path_.parent_path() / options_.best_name));
    });
    return;
  }
  const std::vector<std::string> states = prepare(module, optimizer, parts, *group_, options_.check_parameters);
  run_together(*group_, [&] {
    if (group_->rank() != 0) return;
    writer_->finish();
    if (!options_.asynchronous) {
      write_checkpoint_files(files,
                             [&](const Sink& sink) { write_archive(sink, module, optimizer, info, parts, states); });
      return;
    }
    std::string& bytes = writer_->bytes;
    bytes.clear();
    write_archive([&](const void* data, std::size_t size) { bytes.append(static_cast<const char*>(data), size); },
                  module, optimizer, info, parts, states);
    writer_->thread = std::thread([this, files] {
      // On Linux this affects only this thread. On busy cores the training steps have priority.
      ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), 19);
      try {
        write_checkpoint_files(files, [&](const Sink& sink) { sink(writer_->bytes.data(), writer_->bytes.size()); });
      } catch (...) {
        writer_->failure = std::current_exception();
      }
    });
  });
}

void Checkpoint::wait() {
  run_together(*group_, [&] { writer_->finish(); });
}

CheckpointInfo Checkpoint::load(torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                                const std::vector<CheckpointPart>& parts) {
  wait();
  try {
    return load_checkpoint(path_, module, optimizer, *group_, parts);
  } catch (const InvalidArgument&) {  // All ranks throw the same error.
    bool recovered = false;
    run_together(*group_, [&] { recovered = group_->rank() == 0 && recover_checkpoint(path_); });
    if (broadcast_bytes(*group_, recovered ? "recovered" : "").empty()) throw;
  }
  return load_checkpoint(path_, module, optimizer, *group_, parts);
}

}  // namespace ddpkit::train
