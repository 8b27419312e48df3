#include <ddpkit/train/run.h>

#include <c10/util/ScopeExit.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>
#include <torch/utils.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <nlohmann/json.hpp>

#include <fmt/format.h>

#include <ddpkit/data/resumable_sampler.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/train/atomic_file.h>
#include <ddpkit/train/json_text.h>
#include <ddpkit/train/metrics.h>
#include <ddpkit/train/text.h>
#include <ddpkit/train/together.h>

#include "optim/elastic.h"
#include "train/checkpoint_archive.h"
#include "train/checkpoint_shards.h"
#include "train/console.h"
#include "train/history.h"
#include "train/profile_window.h"
#include "train/training_lock.h"

namespace ddpkit::train {

Run::Run(RunOptions& options, const Options& declared, const ProcessGroup& group, std::vector<c10::Device> devices)
    : options_(options),
      declared_(declared),
      group_(group),
      devices_(devices.empty() ? std::vector<c10::Device>{group.device()} : std::move(devices)),
      amp_(options.amp ? optim::fastest_type(group.device()) : at::kFloat),
      scaler_(group, {.enabled = amp_ == at::kHalf}) {
  if (options.profile && !options.save)
    throw UsageError("--profile writes into the run folder, which --no-save disables");
  if (options.profile && options.elastic)
    throw UsageError("--profile measures a fixed number of ranks: it cannot be combined with --elastic");
  const std::string kind = group.device().is_cpu() ? "CPU " : "";
  print(fmt::format("Distributed training: {} {}{}(s)", this->devices(), kind, device_word(devices_)));
  print("Using device: " + group.device().str());
}

Run::~Run() = default;

int Run::devices() const { return static_cast<int>(devices_.size()) * group_.world_size(); }

void Run::print(const std::string& line) const {
  if (prints()) print_line(line);
}

std::int64_t Run::batches_of(std::size_t samples) const {
  return (static_cast<std::int64_t>(samples) + samples_per_batch() - 1) / samples_per_batch();
}

std::int64_t Run::updates_of(std::size_t samples) const {
  return (batches_of(samples) + options_.grad_accum_steps - 1) / options_.grad_accum_steps;
}

void Run::print_batches(std::int64_t train, std::int64_t evaluation, const std::string& evaluation_name,
                        double batch_size, const std::string& unit) const {
  const char* word = device_word(devices_);
  const auto print_one = [&](const std::string& name, std::int64_t each, int times) {
    if (each > 0) print(fmt::format("{} batches: {} (per {}: ~{})", name, each * times, word, each));
  };
  print_one("Train", train, devices());
  print_one(evaluation_name, evaluation, group_.world_size());  // A process evaluates on one device.
  const double each = batch_size > 0 ? batch_size : options_.batch_size;
  const std::string steps = options_.grad_accum_steps == 1 ? "" : fmt::format(" x {} steps", options_.grad_accum_steps);
  print(fmt::format("Effective batch size: {:.6g}{} ({:.4g}{} per {} x {} {}{})",
                    each * options_.grad_accum_steps * devices(), unit.empty() ? "" : " " + unit, each, steps, word,
                    devices(), word, devices() == 1 ? "" : "s"));
}

void Run::seed_model() const {
  print("Creating model...");
  torch::manual_seed(options_.seed);
}

void Run::print_model(const RunParts& parts) const {
  std::int64_t parameters = 0;
  std::size_t bytes = 0;
  for (const at::Tensor& parameter : parts.model.parameters()) {
    parameters += parameter.numel();
    bytes += parameter.nbytes();
  }
  const double scale = optim::learning_rate_scale(options_.lr_scaling, devices());
  const std::string lr = scale == 1 ? fmt::format("{:.4g}", options_.lr)
                                    : fmt::format("{:.4g} ({:.4g} x {:.4g}, {})", options_.lr * scale, options_.lr,
                                                  scale, declared_.text("lr_scaling"));
  print(fmt::format("{}: {} parameters ({:.1f} MB), {}, lr {}, mixed precision {}, backend {}{}, {}", parts.model_name,
                    count_text(parameters), static_cast<double>(bytes) / 1e6, parts.optimizer_name, lr,
                    precision_name(), group_.backend_name(), options_.sync_batchnorm ? ", sync_batchnorm" : "",
                    is_saved() ? "saving to " + options_.save_dir : "without checkpoints"));
  if (is_resumed())
    print(fmt::format("resumed from {}, {} {}, step {}", folder_.checkpoint.string(), epoch_word(), epoch(), step()));
  print("Starting training...");
}

const char* Run::precision_name() const {
  return amp_ == at::kFloat ? "off" : amp_ == at::kHalf ? "float16" : "bfloat16";
}

optim::Autocast Run::autocast(c10::Device device) const {
  return {device, amp_ == at::kFloat ? at::kBFloat16 : amp_, {.enabled = amp_ != at::kFloat}};
}

// The warm-up begins at the rate for one device (Goyal et al., arXiv 1706.02677).
optim::Schedule Run::schedule(std::int64_t updates_per_epoch) const {
  optim::Schedule result;
  if (options_.lr_schedule == "cosine") result = optim::cosine_decay(updates_per_epoch * options_.epochs);
  const auto updates = static_cast<std::int64_t>(static_cast<double>(updates_per_epoch) * options_.warmup_epochs);
  if (updates == 0) return result;
  const double scale = optim::learning_rate_scale(options_.lr_scaling, devices());
  return result * optim::warmup(updates, scale > 1 ? std::min(1 / scale, most_warmup_start_) : 1.0 / 3);
}

void Run::make_scheduler(std::int64_t updates_per_epoch) {
  scheduler_.emplace(*optimizer_, schedule(updates_per_epoch),
                     optim::LearningRateOptions{.scaling = options_.lr_scaling, .world_size = devices()});
}

std::int64_t Run::updates_per_epoch() const {
  return sampler_ ? updates_of(sampler_->num_samples()) : static_cast<std::int64_t>(batches_->num_batches());
}

std::int64_t Run::updates_left() const {
  return sampler_ ? updates_of(sampler_->indices().size())
                  : static_cast<std::int64_t>(batches_->num_batches() - batches_->position());
}

// The learning rate of the sampler's position, as a fraction of the run.
void Run::follow_sampler() {
  scheduler_->set_step((epoch() + 1) * updates_per_epoch() - updates_left());
  if (sampler_) sampler_->set_position(0);
}

void Run::start(const RunParts& given, const nlohmann::json& facts) {
  RunParts parts = given;
  sampler_ = parts.sampler;
  batches_ = parts.batches;
  const bool has_sampler = sampler_ || batches_;
  if (options_.elastic && (!parts.wrapper || !has_sampler))
    throw UsageError(
        fmt::format("--elastic needs a model in DistributedDataParallel and a sampler that can deal the "
                    "samples of a lost rank again; {} lacks {}",
                    declared_.program(), parts.wrapper ? "the sampler" : "the wrapper"));
  resumes_within_epoch_ = parts.resumes_within_epoch;
  most_warmup_start_ = parts.most_warmup_start;
  if (has_sampler) parts.updates_per_epoch = updates_per_epoch();
  epoch_name_ = parts.epoch_name;
  start_ = std::chrono::steady_clock::now();
  model_ = &parts.model;
  optimizer_ = &parts.optimizer;
  make_scheduler(parts.updates_per_epoch);
  state_ = {checkpoint_part("scheduler", *scheduler_), checkpoint_part("scaler", scaler_)};
  if (sampler_) state_.push_back(checkpoint_part("sampler", *sampler_));
  if (batches_) state_.push_back(checkpoint_part("sampler", *batches_));
  state_.insert(state_.end(), parts.state.begin(), parts.state.end());
  nlohmann::json config = nlohmann::json::parse(declared_.resolved());
  config.update(facts);
  config.update(
      {{"program", declared_.program()}, {"precision", precision_name()}, {"world_size", group_.world_size()}});
  stop_.emplace(group_);
  const std::string description = json_text(config);
  if (!options_.save || group_.is_joining()) {
    info_.config = description;
    start_elastic(parts);
    if (options_.save) open_checkpoint();
    return print_model(parts);
  }
  open_folder(description, parts.facts_that_may_differ);
  open_checkpoint();
  if (folder_.to_resume) info_ = checkpoint_->load(*model_, *optimizer_, state_);
  if (is_resumed() && has_sampler) {
    if (sampler_) sampler_->set_epoch(static_cast<std::uint64_t>(epoch()));
    follow_sampler();
  }
  info_.config = description;
  start_elastic(parts);
  kept_step_ = info_.step;
  run_together(group_, [&] {
    if (!options_.tensorboard || !is_main()) return;
    summary_.emplace(std::filesystem::path(options_.save_dir) / "logs", is_resumed() ? step() + 1 : 0);
    summary_->add_text("config", "```\n" + json_text(config, 2) + "\n```", step());
  });
  if (is_main()) history_ = std::make_unique<History>(options_.save_dir);
  if (history_ && is_resumed()) history_->load(info_.step);
  if (options_.profile)
    profile_ = std::make_unique<ProfileWindow>(group_, parts.wrapper,
                                               (std::filesystem::path(options_.save_dir) / "trace.json").string());
  print_model(parts);
}

// Opens the run folder and writes config.yaml, which --config reads.
void Run::open_folder(const std::string& description, const std::vector<std::string>& facts_that_may_differ) {
  if (options_.save_dir.empty()) {
    std::string folder;
    run_together(group_, [&] {
      if (is_main()) folder = default_run_folder(declared_.program(), options_.resume).string();
    });
    options_.save_dir = broadcast_bytes(group_, folder);
  }
  std::vector<std::string> may_differ = declared_.keys_that_may_differ();
  may_differ.insert(may_differ.end(), facts_that_may_differ.begin(), facts_that_may_differ.end());
  folder_ =
      open_run_folder(options_.save_dir, description,
                      {.resume = options_.resume, .overwrite = options_.overwrite, .may_differ = may_differ}, group_);
  run_together(group_, [&] {
    if (!is_main()) return;
    std::string text =
        fmt::format("# The options of this run; {} --config THIS_FILE resumes it.\n", declared_.program());
    const nlohmann::json values = nlohmann::json::parse(declared_.resolved());
    for (const auto& [key, value] : values.items())
      text += fmt::format("{}: {}\n", key, json_text(value));  // JSON values are valid YAML.
    write_text(std::filesystem::path(options_.save_dir) / "config.yaml", text);
  });
}

void Run::open_checkpoint() {
  checkpoint_.emplace(
      folder_.checkpoint, group_,
      CheckpointOptions{.keep = options_.save_total_limit,
                        .asynchronous = !options_.elastic,  // A lost rank 0 would take the file with it.
                        .sharded = parameter_shards_of(*optimizer_) != nullptr,
                        .best_epoch_stem = "best_model_epoch"});
}

// A new rank joins the others here.
void Run::start_elastic(const RunParts& parts) {
  if (!options_.elastic) return;
  const optim::ElasticOptions options{.min_ranks = options_.min_ranks,
                                      .on_change = [this](const Regroup&) { adapt_to_ranks(); }};
  const auto start = [&](auto& sampler) {
    elastic_ = std::make_unique<optim::Elastic>(*parts.wrapper, parts.model, sampler, options, *optimizer_, shared_);
  };
  sampler_ ? start(*sampler_) : start(*batches_);
  optim::Elastic::Impl::of(*elastic_).steps = info_.step;
}

void Run::Shared::save(torch::serialize::OutputArchive& archive) const {
  const std::pair<const char*, std::string> texts[] = {{"config", run.info_.config},
                                                       {"save_dir", run.options_.save_dir},
                                                       {"checkpoint", run.folder_.checkpoint.string()}};
  for (const auto& [key, text] : texts) archive.write(key, c10::IValue(text));
  archive.write("epoch", c10::IValue(run.info_.epoch));
  archive.write("step", c10::IValue(run.info_.step));
  write_parts(archive, run.state_);
}

void Run::Shared::load(torch::serialize::InputArchive& archive) {
  const auto read = [&](const char* key) {
    c10::IValue value;
    archive.read(key, value);
    return value;
  };
  run.info_.config = read("config").toStringRef();
  run.options_.save_dir = read("save_dir").toStringRef();
  run.folder_.checkpoint = read("checkpoint").toStringRef();
  run.info_.epoch = read("epoch").toInt();
  run.info_.step = run.kept_step_ = read("step").toInt();
  for (const CheckpointPart& part : run.state_) {
    if (part.of_each_rank) continue;
    torch::serialize::InputArchive nested;
    archive.read("part_" + part.name, nested);
    part.load(nested);
  }
}

// As a run that resumes on this number of ranks.
void Run::adapt_to_ranks() {
  make_scheduler(updates_per_epoch());
  follow_sampler();
  nlohmann::json config = nlohmann::json::parse(info_.config);
  config["world_size"] = group_.world_size();
  info_.config = json_text(config);
}

void Run::become_main() {
  if (!is_main() || !is_saved() || folder_.lock) return;
  folder_.lock = lock_folder(options_.save_dir);
  wait_for_writer(folder_.checkpoint);  // The kernel frees the memory of the lost rank 0 before it closes its files.
}

void Run::retry(const std::function<void()>& action) {
  if (!elastic_ || retries_) return action();
  retries_ = true;
  const auto end = c10::make_scope_exit([&] { retries_ = false; });
  elastic_->retry(action);
}

void Run::step_optimizer() {
  const auto span = profile_ ? profile_->update_span() : std::nullopt;
  scaler_.step(*optimizer_);
  scaler_.update();
  scheduler_->step();
}

void Run::save(bool is_best) {
  must_save_ = true;
  retry([&] {
    become_main();
    if (checkpoint_) checkpoint_->save(*model_, *optimizer_, info_, state_, is_best);
  });
  must_save_ = false;
  kept_step_ = info_.step;
}

bool Run::must_end() {
  if (is_out_of_steps()) return true;
  is_stopped_ = stop_->requested();
  return is_stopped_;
}

bool Run::finish() {
  retry([&] {
    if (checkpoint_) checkpoint_->wait();
  });
  print_profile(true);
  if (is_stopped_ && is_main())
    log_line(
        fmt::format("{}: {}", declared_.program(), stop_->describe(kept_step_, is_saved() ? options_.save_dir : "")));
  return !is_stopped_;
}

void Run::print_profile(bool is_last) {
  if (!profile_) return;
  if (const std::string table = profile_->finish(is_last); !table.empty()) print(table);
}

std::string Run::epoch_word() const {
  std::string word = epoch_name_;
  word.front() = static_cast<char>(std::tolower(static_cast<unsigned char>(word.front())));
  return word;
}

ProgressBar Run::bar(std::int64_t epoch, const std::string& loop, std::int64_t steps, const std::string& unit,
                     double items_per_step) const {
  const std::string& progress = options_.progress;
  ProgressOptions options{.label = fmt::format("{} {}/{} {}", epoch_name_, epoch, options_.epochs, loop),
                          .unit = unit,
                          .items_per_step = items_per_step,
                          .enabled = is_main() && progress != "off",
                          .heartbeat = progress == "lines" || (progress == "auto" && !options_.json)};
  if (!unit.empty()) options.later_steps = (options_.epochs - epoch) * steps;
  return ProgressBar(steps, std::move(options));
}

void Run::report(const std::string& line, const nlohmann::ordered_json& values,
                 const std::vector<std::pair<std::string, double>>& scalars) {
  if (!is_main()) return;
  become_main();
  if (is_saved() && !history_) {  // Another rank has reported the epochs before.
    history_ = std::make_unique<History>(options_.save_dir);
    history_->load(step() - 1);
    if (options_.tensorboard) summary_.emplace(std::filesystem::path(options_.save_dir) / "logs", step());
  }
  print_line(options_.json ? values.dump() : fmt::format("{} {}/{} - {}", epoch_name_, epoch(), options_.epochs, line));
  if (history_) history_->add(epoch(), step(), scalars, epoch_word());
  if (!summary_) return;
  for (const auto& [tag, value] : scalars) summary_->add_scalar(tag, value, step());
}

void Run::print_best(const std::string& score) const {
  if (is_saved())
    print(fmt::format("  {} Saved best model: best_model_epoch{}.pt ({})", has_utf8() ? "✓" : "*", epoch() - 1, score));
}

void Run::write_file(const std::string& name, const std::string& text) const {
  if (is_main() && is_saved()) write_text(std::filesystem::path(options_.save_dir) / name, text);
}

void Run::print_summary(const std::string& result) {
  const bool is_cpu = devices_.front().is_cpu();
  std::vector<std::int64_t> memory;
  retry([&] { memory = is_cpu ? peak_memory_of_ranks(group_) : peak_memory_of_devices(devices_, group_); });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  print(fmt::format("Training finished: {}, {} in {}{}", number_of(epoch(), epoch_word()), number_of(step(), "update"),
                    time_text(seconds),
                    seconds_ > 0 ? fmt::format(" ({:.1f} {}/s)", static_cast<double>(items_) / seconds_, unit_) : ""));
  print("Peak memory: " + memory_of_each(memory, is_cpu ? "rank" : "GPU"));
  if (is_saved()) print("Files: " + files_of(options_.save_dir));
  if (is_main()) print_line(result);
}

}  // namespace ddpkit::train
