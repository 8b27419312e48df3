#include "video/config_file.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include <fmt/format.h>

#include <ddpkit/train/atomic_file.h>
#include <ddpkit/train/json_text.h>

namespace video {

nlohmann::json run_config(const TrainOptions& options) {
  return {{"data", std::filesystem::weakly_canonical(options.data).filename().string()},
          {"size", name_of(options.size)},
          {"frames", options.frames},
          {"validation_share", options.validation_share},
          {"repeat_frame", options.repeat_frame},
          {"balance", name_of(options.balance)},
          {"lr", options.trainer.lr},
          {"lr_scaling", name_of(options.lr_scaling)},
          {"warmup_epochs", options.warmup_epochs},
          {"weight_decay", options.weight_decay},
          {"augment", options.augment},
          {"sync_batch_norm", options.sync_batch_norm},
          {"dropout", options.dropout},
          {"width", options.width},
          {"batch_size", options.trainer.batch_size},
          {"epochs", options.trainer.epochs},
          {"seed", options.trainer.seed}};
}

void write_config_file(const std::filesystem::path& path, const TrainOptions& options) {
  nlohmann::json config = run_config(options);
  // Needed to start the run, but may differ when it resumes.
  config["data"] = options.data;
  config["on_bad_data"] = name_of(options.on_bad_data);
  config["check"] = name_of(options.check);
  config["num_workers"] = options.num_workers;
  config["prefetch_factor"] = options.prefetch_factor;
  config["open_videos"] = options.open_videos;
  config["cache_mb"] = options.cache_mb;
  config["amp"] = options.amp;
  config["tensorboard"] = options.tensorboard;
  config["checkpoint_steps"] = options.trainer.checkpoint_steps;
  config["keep_checkpoints"] = options.trainer.keep_checkpoints;
  config["save_dir"] = options.trainer.save_dir;
  if (!options.cache_dir.empty()) config["cache_dir"] = options.cache_dir;
  if (!options.classes.empty()) config["classes"] = options.classes;
  std::string text = "# Written when the run was started; `video --config` on this file resumes it.\n";
  for (const auto& [key, value] : config.items()) {
    std::string name = key;
    std::replace(name.begin(), name.end(), '_', '-');
    text += fmt::format("{}: {}\n", name, ddpkit::train::json_text(value));  // JSON values are valid YAML.
  }
  ddpkit::train::AtomicFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

}  // namespace video
