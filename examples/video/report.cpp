#include "video/report.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include <fmt/format.h>

namespace video {

namespace {

std::size_t widest_of(const std::vector<std::string>& names) {
  std::size_t widest = 5;
  for (const std::string& name : names) widest = std::max(widest, std::min<std::size_t>(name.size(), 24));
  return widest;
}

}  // namespace

std::string as_json(const Epoch& epoch) {
  return nlohmann::ordered_json{{"epoch", epoch.epoch},
                                {"epochs", epoch.epochs},
                                {"step", epoch.step},
                                {"lr", epoch.lr},
                                {"train_loss", epoch.train.loss},
                                {"train_accuracy", epoch.train.accuracy},
                                {"validation_loss", epoch.validation.loss},
                                {"validation_accuracy", epoch.validation.accuracy},
                                {"validation_macro_f1", epoch.validation.macro_f1()},
                                {"validation_f1", epoch.validation.f1()},
                                {"validation_confusion", epoch.validation.confusion},
                                {"validation_clips", epoch.validation.samples},
                                {"best", epoch.is_best},
                                {"clips_per_second", epoch.clips_per_second()},
                                {"seconds", epoch.seconds},
                                {"wait_seconds", epoch.wait_seconds},
                                {"peak_memory_bytes", epoch.peak_memory_bytes},
                                {"world_size", epoch.world_size}}
      .dump();
}

std::string as_line(const Epoch& epoch) {
  return fmt::format("Epoch {}/{} - Train {} | Val {}, F1: {:.4f} | {:.1f} s, {:.1f} clips/s, waited {:.0f}%",
                     epoch.epoch, epoch.epochs, epoch.train.line(), epoch.validation.line(),
                     epoch.validation.macro_f1(), epoch.seconds, epoch.clips_per_second(),
                     100 * epoch.wait_seconds / epoch.seconds);
}

void write_to(ddpkit::train::SummaryWriter& writer, const Epoch& epoch) {
  writer.add_scalar("loss/train", epoch.train.loss, epoch.step);
  writer.add_scalar("loss/validation", epoch.validation.loss, epoch.step);
  writer.add_scalar("accuracy/train", epoch.train.accuracy, epoch.step);
  writer.add_scalar("accuracy/validation", epoch.validation.accuracy, epoch.step);
  writer.add_scalar("f1/validation", epoch.validation.macro_f1(), epoch.step);
  writer.add_scalar("training/lr", epoch.lr, epoch.step);
  writer.add_scalar("training/clips_per_second", epoch.clips_per_second(), epoch.step);
}

std::string class_table(const TrialSet& set, const TrialSplit& split, const std::vector<double>& weights) {
  const std::size_t classes = set.class_names.size(), widest = widest_of(set.class_names);
  std::vector<std::int64_t> train(classes), validation(classes);
  for (const std::size_t i : split.train) ++train[static_cast<std::size_t>(set.trials[i].label)];
  for (const std::size_t i : split.validation) ++validation[static_cast<std::size_t>(set.trials[i].label)];
  std::string table = fmt::format("{:{}}  trials   share  training  validation  weight", "class", widest);
  for (std::size_t k = 0; k < classes; ++k) {
    const std::int64_t all = train[k] + validation[k];
    table += fmt::format("\n{:{}}  {:>6}  {:4.1f} %  {:>8}  {:>10}  {:6.3f}", set.class_names[k].substr(0, widest),
                         widest, all, 100.0 * static_cast<double>(all) / static_cast<double>(set.trials.size()),
                         train[k], validation[k], weights[k]);
  }
  return table + fmt::format("\n{:{}}  {:>6}          {:>8}  {:>10}", "all", widest, set.trials.size(),
                             split.train.size(), split.validation.size());
}

}  // namespace video
