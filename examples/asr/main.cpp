// Speech recognition: Legendre Memory Units trained with CTC on one or several ranks. Trains, evaluates and
// transcribes.
#include <malloc.h>

#include <filesystem>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/comm/environment.h>
#include <ddpkit/train/main.h>
#include <ddpkit/train/text.h>

#include "asr/check.h"
#include "asr/trained_model.h"
#include "asr/trainer.h"
#include "asr/transcribe.h"

namespace {

/// The recordings that script/data speech fetches: the default data.
const std::filesystem::path kSpeech = "data/speech";

struct Transcription {
  std::vector<std::string> files;
  bool streaming = false;
  double piece_ms = 100;
};

ddpkit::ProcessGroup join(ddpkit::train::Program& program, const asr::Options& options) {
  const int ranks = ddpkit::read_launch_environment().world_size;
  if (!options.distributed && ranks > 1)
    throw ddpkit::train::UsageError(
        fmt::format("distributed.enabled is false, but the launcher started {} ranks", ranks));
  const bool is_on_cpu = options.run.launch.num_gpus == 0;
  const ddpkit::InitOptions init{.backend = options.run.backend,
                                 .device = is_on_cpu ? std::optional<at::Device>(at::kCPU) : std::nullopt};
  return options.distributed ? program.join(options.run, init) : program.init_process_group(init);
}

void transcribe(const asr::Options& given, const Transcription& transcription) {
  const asr::TrainedModel trained = asr::load_model(given.run.save_dir);
  asr::Options options = trained.options;
  options.evaluation = given.evaluation;
  for (const std::string& file : transcription.files) {
    const std::string before = transcription.files.size() > 1 ? file + ": " : "";
    if (!transcription.streaming) {
      ddpkit::train::print_line(before + asr::transcribe(*trained.model, options, file));
      continue;
    }
    fmt::print("{}", before);
    asr::transcribe_stream(*trained.model, options, file, transcription.piece_ms, [](double, const std::string& text) {
      fmt::print("{}", text);
      std::fflush(stdout);
    });
    ddpkit::train::print_line("");
  }
}

/// Each batch has another length, so freed blocks rarely fit the next batch. glibc keeps freed blocks of up to 32 MiB
/// on its heap, and would hold almost twice the memory of the largest batch. With this setting, malloc maps each block
/// from 1 MiB on separately and returns it to the system.
void give_large_blocks_back() {
#if defined(__GLIBC__)
  ::mallopt(M_MMAP_THRESHOLD, 1 << 20);
#endif
}

}  // namespace

int main(int argc, char** argv) {
  give_large_blocks_back();
  ddpkit::train::Options options("asr",
                                 "Speech recognition: trains Legendre Memory Units with CTC, on one rank or several.");
  asr::Options asr;
  asr::declare(options, asr);
  options.command("train", "Train a model (the default command)", /*inherits=*/true);
  const auto& evaluate = options.command("evaluate", "Error rates of a run's model on data.dev and data.test", true);
  const auto& check = options.command("check", "Test the distributed set-up", true);
  auto& transcribe_command = options.command("transcribe", "Transcribe recordings", true);
  Transcription transcription;
  transcribe_command.add("file", &transcription.files, "Recordings").positional().required();
  transcribe_command.add("streaming", &transcription.streaming, "Transcribe as a stream, with the recurrent form");
  transcribe_command.add("piece_ms", &transcription.piece_ms, "Length of a streamed piece of sound").between(1, 1e6);
  const auto body = [&](ddpkit::train::Program& program) {
    if (transcribe_command.is_chosen()) return transcribe(asr, transcription);
    const ddpkit::ProcessGroup group = join(program, asr);
    if (evaluate.is_chosen()) return asr::evaluate_run(asr, group);
    if (check.is_chosen()) return asr::check(group);
    if (asr.data.train.empty() && std::filesystem::exists(kSpeech / "train.jsonl")) {
      asr.data.train = kSpeech / "train.jsonl";
      if (asr.data.dev.empty()) asr.data.dev = kSpeech / "dev.jsonl";
    }
    asr::train(asr, options, group);
  };
  return ddpkit::train::run_main(options, argc, argv, body);
}
