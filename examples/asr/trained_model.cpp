#include "asr/trained_model.h"

#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include <fmt/format.h>

#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/train/checkpoint.h>
#include <ddpkit/train/json_text.h>
#include <ddpkit/train/main.h>
#include <ddpkit/train/run_folder.h>
#include <ddpkit/train/text.h>
#include <ddpkit/train/together.h>

#include "asr/evaluation.h"

namespace asr {

using ddpkit::train::print_line;

std::unique_ptr<Dataset> open_dataset(const std::string& path, const Options& options, const Recognizer& model,
                                      Faults& faults, const ddpkit::ProcessGroup& group) {
  std::vector<Utterance> utterances;
  ddpkit::train::run_together(group, [&] { utterances = including(read_corpus(path), options.data.include); });
  return std::make_unique<Dataset>(
      std::move(utterances),
      DatasetOptions{.name = path,
                     .features = options.features,
                     .cache_mb = options.data.cache_mb,
                     .output_frames = [&model](std::int64_t frames) { return model.output_frames(frames); }},
      faults, group);
}

TrainedModel load_model(const std::string& save_dir) {
  const std::filesystem::path folder =
      save_dir.empty() ? ddpkit::train::last_run_folder("asr") : std::filesystem::path(save_dir);
  if (folder.empty())
    throw ddpkit::train::UsageError("there is no run in checkpoints/asr; name the run to use with --save-dir FOLDER");
  const std::filesystem::path checkpoint = folder / "checkpoint.pt";
  nlohmann::json json = nlohmann::json::parse(ddpkit::train::read_checkpoint_info(checkpoint).config);
  if (!json.is_object() || json.value("program", "") != "asr")
    throw ddpkit::InvalidArgument(fmt::format("{} belongs to a run of another program", checkpoint.string()));
  for (const char* fact : {"program", "precision", "world_size", "train_utterances"}) json.erase(fact);
  TrainedModel result;
  ddpkit::train::Options declared("asr", "");
  declare(declared, result.options);
  declared.parse_resolved(ddpkit::train::json_text(json), checkpoint.string());
  result.model = std::make_shared<Recognizer>(model_options(result.options));
  ddpkit::optim::FusedAdamW optimizer(result.model->parameters());
  ddpkit::train::read_checkpoint(checkpoint, *result.model, optimizer);
  result.model->eval();
  return result;
}

void evaluate_run(const Options& given, const ddpkit::ProcessGroup& group) {
  TrainedModel trained;
  ddpkit::train::run_together(group, [&] { trained = load_model(given.run.save_dir); });
  trained.model->to(group.device());
  Options options = trained.options;
  options.evaluation = given.evaluation;
  options.data.on_bad_data = given.data.on_bad_data;
  if (!given.data.include.empty()) options.data.include = given.data.include;
  const bool has_own = !given.data.train.empty() || !given.data.dev.empty() || !given.data.test.empty();
  if (has_own) options.data = given.data;
  Faults faults(options.data.on_bad_data);
  bool found = false;
  for (const auto& [name, path] : {std::pair{"train", has_own ? options.data.train : ""},
                                   std::pair{"dev", options.data.dev}, std::pair{"test", options.data.test}}) {
    if (path.empty()) continue;
    found = true;
    const auto dataset = open_dataset(path, options, *trained.model, faults, group);
    const EvaluationResult result = evaluate(*trained.model, *dataset, options.evaluation, group);
    if (group.rank() != 0) continue;
    if (given.run.json) {
      print_line(ddpkit::train::json_text(nlohmann::ordered_json{{"set", name},
                                                                 {"path", path},
                                                                 {"utterances", result.errors.utterances},
                                                                 {"loss", result.loss},
                                                                 {"cer", result.errors.cer()},
                                                                 {"wer", result.errors.wer()}}));
      continue;
    }
    print_line(fmt::format("{}: {} utterances  loss {:.4f}  CER {:.1f} %  WER {:.1f} %", path, result.errors.utterances,
                           result.loss, 100 * result.errors.cer(), 100 * result.errors.wer()));
    for (const Sample& sample : result.samples)
      print_line(
          fmt::format("{}\n  reference:  {}\n  hypothesis: {}", sample.name, sample.reference, sample.hypothesis));
  }
  if (!found) throw ddpkit::train::UsageError("neither data.dev nor data.test is given, nor data.train");
  const auto counts = faults.count(group);
  if (group.rank() == 0) print_line(describe(counts));
}

}  // namespace asr
