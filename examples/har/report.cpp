#include "har/report.h"

#include <nlohmann/json.hpp>

#include <fmt/format.h>

namespace har {

std::string as_json(const Epoch& epoch) {
  return nlohmann::ordered_json{{"epoch", epoch.epoch},
                                {"epochs", epoch.epochs},
                                {"step", epoch.step},
                                {"lr", epoch.lr},
                                {"train_loss", epoch.train.loss},
                                {"train_accuracy", epoch.train.accuracy},
                                {"test_loss", epoch.test.loss},
                                {"test_accuracy", epoch.test.accuracy},
                                {"test_macro_f1", epoch.test.macro_f1()},
                                {"test_f1", epoch.test.f1()},
                                {"test_confusion", epoch.test.confusion},
                                {"samples_per_second", epoch.samples_per_second()},
                                {"seconds", epoch.seconds},
                                {"peak_memory_bytes", epoch.peak_memory_bytes},
                                {"peak_device_bytes", epoch.peak_device_bytes},
                                {"world_size", epoch.world_size},
                                {"devices", epoch.devices}}
      .dump();
}

std::string as_line(const Epoch& epoch) {
  return fmt::format("Epoch {}/{} - Train {} | Test {}, F1: {:.4f} | {:.1f} s, {:.0f} samples/s", epoch.epoch,
                     epoch.epochs, epoch.train.line(), epoch.test.line(), epoch.test.macro_f1(), epoch.seconds,
                     epoch.samples_per_second());
}

void write_to(ddpkit::train::SummaryWriter& writer, const Epoch& epoch) {
  writer.add_scalar("loss/train", epoch.train.loss, epoch.step);
  writer.add_scalar("loss/test", epoch.test.loss, epoch.step);
  writer.add_scalar("accuracy/train", epoch.train.accuracy, epoch.step);
  writer.add_scalar("accuracy/test", epoch.test.accuracy, epoch.step);
  writer.add_scalar("f1/test", epoch.test.macro_f1(), epoch.step);
  writer.add_scalar("training/lr", epoch.lr, epoch.step);
  writer.add_scalar("training/samples_per_second", epoch.samples_per_second(), epoch.step);
}

}  // namespace har
