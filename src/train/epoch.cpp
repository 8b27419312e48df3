#include <ddpkit/train/run.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <ranges>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/comm/trace.h>
#include <ddpkit/data/length_bucketed_sampler.h>
#include <ddpkit/data/resumable_sampler.h>
#include <ddpkit/error.h>
#include <ddpkit/train/metrics.h>
#include <ddpkit/train/seed.h>

#include "optim/elastic.h"
#include "train/profile_window.h"

namespace ddpkit::train {

Epoch::Epoch(Run& run, const std::string& unit, std::int64_t items_per_sample)
    : run_(run), items_per_sample_(items_per_sample), unit_(unit) {
  const auto number = static_cast<std::uint64_t>(run.epoch());
  run.sampler_ ? run.sampler_->set_epoch(number) : run.batches_->set_epoch(number);
  deal();
  if (run.sampler_) is_new_ = seed_epoch(run.options_.seed, run.epoch(), run.group_.rank());
}

Epoch::Epoch(Run& run, std::int64_t updates, std::int64_t items, const std::string& unit)
    : run_(run), updates_(updates), items_(items), generation_(run.group_.generation()), unit_(unit) {
  make_bar();
}

void Epoch::deal() {
  if (run_.sampler_) {
    order_ = run_.sampler_->indices();
    updates_ = run_.updates_of(order_.size());
    items_ = static_cast<std::int64_t>(order_.size()) * run_.group_.world_size() * items_per_sample_;
  } else {
    updates_ = run_.updates_left();
    items_ = 0;
    const std::size_t position = run_.batches_->position();
    for (const LengthBucketedBatch& batch : run_.batches_->batches() | std::views::drop(position))
      items_ += static_cast<std::int64_t>(batch.batch_size) * items_per_sample_;
    run_.batches_->set_position(position);
  }
  done_ = 0;
  generation_ = run_.group_.generation();
  make_bar();
}

void Epoch::make_bar() {
  const double items_per_update =
      static_cast<double>(items_) / static_cast<double>(std::max<std::int64_t>(updates_, 1));
  bar_.reset(new ProgressBar(run_.bar(run_.info_.epoch + 1, "Training", updates_, unit_, items_per_update)));
}

std::int64_t Epoch::items_done() const { return items_ * done_ / std::max<std::int64_t>(updates_, 1); }

void Epoch::retry(const std::function<void()>& updates) {
  run_.retry([&] {
    if (run_.elastic_) optim::Elastic::Impl::of(*run_.elastic_).end();
    if (generation_ != run_.group_.generation()) {
      items_before_ += items_done();
      deal();
      if (run_.must_save_) run_.save();
    }
    try {
      updates();
    } catch (const PeerLost&) {
      bar_->clear();
      throw;
    }
  });
}

std::int64_t Epoch::batches() const { return run_.batches_ ? updates_ : run_.batches_of(order_.size()); }

std::vector<std::int64_t> Epoch::batch(std::int64_t number) const {
  const auto size = static_cast<std::ptrdiff_t>(run_.samples_per_batch());
  const auto begin = order_.begin() + size * number;
  return {begin, begin + std::min(size, order_.end() - begin)};
}

bool Epoch::next() {
  const bool must_end = done_ < updates_ && run_.must_end();
  if (run_.profile_) run_.profile_->end_update();
  if (done_ == updates_) return false;
  if (must_end) {
    // Without a new update, the last checkpoint is already current.
    if (run_.is_stopped_ && (done_ > 0 || items_before_ > 0) && run_.resumes_within_epoch_) run_.save();
    return false;
  }
  if (run_.profile_) run_.profile_->begin_update();
  set_step(run_.info_.step);
  lr_ = run_.scheduler_->learning_rates().front();
  if (run_.elastic_) optim::Elastic::Impl::of(*run_.elastic_).begin_step();
  return true;
}

std::size_t Epoch::position() const {
  if (run_.batches_) return static_cast<std::size_t>(done_);
  const auto used = static_cast<std::size_t>(done_ * run_.options_.grad_accum_steps * run_.samples_per_batch());
  return std::min(used, order_.size());
}

void Epoch::advance(const std::function<std::string()>& note) {
  const std::size_t before = position();
  ++done_;
  if (run_.sampler_) run_.sampler_->set_position(position());
  if (run_.batches_) run_.batches_->set_position(run_.batches_->position() + 1);
  if (run_.elastic_) optim::Elastic::Impl::of(*run_.elastic_).add_step(position() - before);
  ++run_.info_.step;
  bar_->advance(note);
  const std::int64_t interval = run_.options_.save_steps;
  if (done_ < updates_ && interval > 0 && run_.info_.step % interval == 0) run_.save();
}

bool Epoch::finish(double loss) {
  seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  if (run_.profile_) run_.profile_->end_update();  // The loop may count its updates without a last next().
  bar_->clear();
  run_.print_profile(false);
  run_.items_ += items_before_ + items_done();
  run_.seconds_ += seconds_;
  run_.unit_ = unit_;
  if (run_.is_stopped_) return false;
  if (!std::isfinite(loss))
    throw Error(fmt::format("the loss became {} in {} {}: lower --lr ({})", loss, run_.epoch_word(),
                            run_.info_.epoch + 1, run_.options_.lr),
                {.rank = 0});
  if (done_ < updates_) return false;
  ++run_.info_.epoch;
  if (run_.sampler_) run_.sampler_->set_epoch(static_cast<std::uint64_t>(run_.epoch()));
  if (run_.batches_) run_.batches_->set_epoch(static_cast<std::uint64_t>(run_.epoch()));
  return true;
}

void Epoch::report(const std::string& line, const nlohmann::ordered_json& values,
                   const std::vector<std::pair<std::string, double>>& scalars) {
  nlohmann::ordered_json json = {
      {"epoch", run_.info_.epoch}, {"epochs", run_.options_.epochs}, {"step", run_.info_.step}, {"lr", lr_}};
  json.update(values);
  std::vector<std::pair<std::string, double>> all = scalars;
  all.emplace_back("training/lr", lr_);
  bool is_reported = false;
  run_.retry([&] {
    json.update({{unit_ + "_per_second", items_per_second()},
                 {"seconds", seconds_},
                 {"peak_memory_bytes", peak_memory_of_ranks(run_.group_)},
                 {"peak_device_bytes", peak_memory_of_devices(run_.devices_, run_.group_)},
                 {"world_size", run_.group_.world_size()},
                 {"devices", run_.devices()}});
    if (!std::exchange(is_reported, run_.is_main())) run_.report(line, json, all);
  });
}

void Epoch::report(const ClassificationResult& train, const ClassificationResult& evaluation, const std::string& name,
                   const std::string& label, const std::vector<std::string>& class_names, const std::string& ending,
                   const nlohmann::ordered_json& more) {
  nlohmann::ordered_json values = {{"train_loss", train.loss},
                                   {"train_accuracy", train.accuracy},
                                   {name + "_loss", evaluation.loss},
                                   {name + "_accuracy", evaluation.accuracy},
                                   {name + "_macro_f1", evaluation.macro_f1()},
                                   {name + "_f1", evaluation.f1()},
                                   {name + "_confusion", evaluation.confusion}};
  if (!more.is_null()) values.update(more);
  report(fmt::format("Train {} | {} {}, F1: {:.4f} | {}", train.line(), label, evaluation.line(), evaluation.macro_f1(),
                     ending),
         values,
         {{"loss/train", train.loss},
          {"loss/" + name, evaluation.loss},
          {"accuracy/train", train.accuracy},
          {"accuracy/" + name, evaluation.accuracy},
          {"f1/" + name, evaluation.macro_f1()},
          {fmt::format("training/{}_per_second", unit_), items_per_second()}});
  run_.write_file("confusion.svg", confusion_svg(evaluation, class_names));
}

EvaluationScope::EvaluationScope(torch::nn::Module& model, const ProcessGroup& group)
    : model_(model), was_training_(model.is_training()) {
  for (const at::Tensor& buffer : model.buffers()) group.broadcast(buffer);
  model.eval();
}

EvaluationScope::~EvaluationScope() { model_.train(was_training_); }

}  // namespace ddpkit::train
