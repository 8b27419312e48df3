// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

namespace ddpkit::train {

/// Writes scalars and texts for TensorBoard: `tensorboard --logdir FOLDER` draws them. Call on one rank only.
///
///     SummaryWriter writer(folder / "tensorboard");
///     writer.add_scalar("loss/train", loss, step);
///
/// The file is TensorBoard's own: records in TFRecord's framing (length, CRC-32C) that hold an Event each
/// (tensorflow/core/util/event.proto). Each writer begins a file of its own, as a resumed run does.
///
/// Each event is written to the file at once, in one system call: kill -9 loses no event. The functions throw Error if
/// the disk is full.
class SummaryWriter {
 public:
  /// Makes the folder where it is missing. With `purge_step`, TensorBoard forgets what earlier files of the folder say
  /// of that step and later ones: where a resumed run goes on. Throws Error with the system's reason.
  explicit SummaryWriter(const std::filesystem::path& folder, std::int64_t purge_step = 0);
  ~SummaryWriter();
  SummaryWriter(SummaryWriter&&) noexcept;
  SummaryWriter& operator=(SummaryWriter&&) noexcept;

  /// `tag` groups by what stands before its first '/'. NaN and infinity are shown as such.
  void add_scalar(const std::string& tag, double value, std::int64_t step);
  /// Markdown, in TensorBoard's text tab.
  void add_text(const std::string& tag, const std::string& text, std::int64_t step);

  const std::filesystem::path& path() const noexcept;

 private:
  struct File;
  std::unique_ptr<File> file_;
};

}  // namespace ddpkit::train
