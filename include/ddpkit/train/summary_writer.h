// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

namespace ddpkit::train {

/// Writes scalars and texts for TensorBoard (`tensorboard --logdir FOLDER`). Call on one rank only.
///
///     SummaryWriter writer(folder / "tensorboard");
///     writer.add_scalar("loss/train", loss, step);
///
/// The file has TensorBoard's format: TFRecords (length, CRC-32C) that each hold an Event
/// (tensorflow/core/util/event.proto). Each writer starts a new file.
///
/// Each event is written immediately, in one system call, so kill -9 loses no event. The functions throw Error, for
/// example if the disk is full.
class SummaryWriter {
 public:
  /// Creates the folder if necessary. With `purge_step`, TensorBoard ignores the events of earlier files from that step
  /// on: pass the step at which a run resumes. Throws Error with the system's reason.
  explicit SummaryWriter(const std::filesystem::path& folder, std::int64_t purge_step = 0);
  ~SummaryWriter();
  SummaryWriter(SummaryWriter&&) noexcept;
  SummaryWriter& operator=(SummaryWriter&&) noexcept;

  /// The part of `tag` before its first '/' is the group. NaN and infinity are shown as such.
  void add_scalar(const std::string& tag, double value, std::int64_t step);
  /// Adds Markdown for TensorBoard's text tab.
  void add_text(const std::string& tag, const std::string& text, std::int64_t step);

  const std::filesystem::path& path() const noexcept;  ///< The file.

 private:
  struct File;
  std::unique_ptr<File> file_;
};

}  // namespace ddpkit::train
