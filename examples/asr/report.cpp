#include "asr/report.h"

#include <nlohmann/json.hpp>

#include <fmt/format.h>

#include <ddpkit/train/summary_writer.h>

namespace asr {

std::string as_json(const Epoch& epoch) {
  nlohmann::ordered_json json = {{"epoch", epoch.epoch},
                                 {"epochs", epoch.epochs},
                                 {"step", epoch.step},
                                 {"lr", epoch.lr},
                                 {"train_loss", epoch.train_loss}};
  if (epoch.dev_loss) {
    json["dev_loss"] = *epoch.dev_loss;
    json["dev_cer"] = epoch.dev.cer();
    json["dev_wer"] = epoch.dev.wer();
    json["dev_utterances"] = epoch.dev.utterances;
  }
  json.update(nlohmann::ordered_json{{"seconds", epoch.seconds},
                                     {"audio_seconds", epoch.audio_seconds},
                                     {"median_step_ms", epoch.median_step_ms},
                                     {"wait_seconds", epoch.wait_seconds},
                                     {"exchange_exposed_share", epoch.exchange_exposed_share},
                                     {"first_step_at", epoch.first_step_at},
                                     {"fullest_over_mean", epoch.fullest_over_mean},
                                     {"padding", epoch.padding},
                                     {"peak_memory_bytes", epoch.peak_memory_bytes},
                                     {"world_size", epoch.world_size}});
  return json.dump();
}

std::string as_line(const Epoch& epoch) {
  std::string line = fmt::format("Epoch {}/{} - Train Loss: {:.4f}", epoch.epoch, epoch.epochs, epoch.train_loss);
  if (epoch.dev_loss)
    line += fmt::format(" | Dev Loss: {:.4f}, CER: {:.2f}%, WER: {:.2f}%", *epoch.dev_loss, 100 * epoch.dev.cer(),
                        100 * epoch.dev.wer());
  return line + fmt::format(" | {:.1f} s, {:.3f} s/batch, {:.0f}x real time, waited {:.0f}%", epoch.seconds,
                            epoch.median_step_ms / 1000, epoch.audio_seconds / epoch.seconds,
                            100 * epoch.wait_seconds / epoch.seconds);
}

void write_to(ddpkit::train::SummaryWriter& writer, const Epoch& epoch) {
  writer.add_scalar("loss/train", epoch.train_loss, epoch.step);
  if (epoch.dev_loss) {
    writer.add_scalar("loss/dev", *epoch.dev_loss, epoch.step);
    writer.add_scalar("error/dev_cer", epoch.dev.cer(), epoch.step);
    writer.add_scalar("error/dev_wer", epoch.dev.wer(), epoch.step);
  }
  writer.add_scalar("training/lr", epoch.lr, epoch.step);
  writer.add_scalar("training/audio_seconds_per_second", epoch.audio_seconds / epoch.seconds, epoch.step);
}

}  // namespace asr
