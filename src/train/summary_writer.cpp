#include <ddpkit/train/summary_writer.h>

#include <unistd.h>

#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <system_error>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "train/state/crc32.h"

namespace ddpkit::train {
namespace {

template <class T>
void append_little_endian(std::string& out, T value) {
  static_assert(std::endian::native == std::endian::little, "TFRecord is little-endian");
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  out.append(bytes, sizeof(T));
}

/// Returns a TFRecord record: length, its masked CRC, the data, its masked CRC.
std::string framed(std::string_view data) {
  const auto masked = [](std::uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8u; };
  std::string record;
  append_little_endian(record, static_cast<std::uint64_t>(data.size()));
  append_little_endian(record, masked(crc32c(record.data(), record.size())));
  record += data;
  append_little_endian(record, masked(crc32c(data.data(), data.size())));
  return record;
}

/// A protocol buffers message, written field by field.
class Message {
 public:
  Message& varint(int field, std::uint64_t value) {
    key(field, 0);
    append_varint(value);
    return *this;
  }
  Message& fixed(int field, double value) {
    key(field, 1);
    append_little_endian(bytes_, value);
    return *this;
  }
  Message& fixed(int field, float value) {
    key(field, 5);
    append_little_endian(bytes_, value);
    return *this;
  }
  Message& bytes(int field, std::string_view value) {
    key(field, 2);
    append_varint(value.size());
    bytes_ += value;
    return *this;
  }
  Message& nested(int field, const Message& message) { return bytes(field, message.bytes_); }
  const std::string& data() const { return bytes_; }

 private:
  void key(int field, unsigned wire_type) { append_varint(static_cast<unsigned>(field) << 3 | wire_type); }
  void append_varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
    bytes_ += static_cast<char>(value);
  }

  std::string bytes_;
};

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Fields of tensorflow.Event.
constexpr int kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7;

Message event(std::int64_t step) {
  Message message;
  message.fixed(kWallTime, seconds_since_1970());
  if (step != 0) message.varint(kStep, static_cast<std::uint64_t>(step));
  return message;
}

}  // namespace

struct SummaryWriter::File {
  ~File() {
    if (stream) std::fclose(stream);
  }
  [[noreturn]] void fail(const char* what) const {
    throw Error(fmt::format("cannot {} {}: {}", what, path.string(), std::generic_category().message(errno)));
  }
  void write(const Message& message) {
    const std::string record = framed(message.data());
    if (std::fwrite(record.data(), 1, record.size(), stream) != record.size()) fail("write");
  }

  std::filesystem::path path;
  std::FILE* stream = nullptr;
};

SummaryWriter::SummaryWriter(const std::filesystem::path& folder, std::int64_t purge_step)
    : file_(std::make_unique<File>()) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw Error(fmt::format("cannot make the folder {}: {}", folder.string(), error.message()));
  char host[256] = "localhost";
  ::gethostname(host, sizeof(host) - 1);
  // TensorBoard reads the files of a folder in the order of their names.
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now).count();
  const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count() % 1'000'000'000;
  file_->path = folder / fmt::format("events.out.tfevents.{:010}.{}.{}.{:09}", seconds, host, ::getpid(), nanoseconds);
  file_->stream = std::fopen(file_->path.c_str(), "wbx");
  if (!file_->stream) file_->fail("create");
  std::setvbuf(file_->stream, nullptr, _IONBF, 0);
  file_->write(event(0).bytes(kFileVersion, "brain.Event:2"));
  if (purge_step > 0) {
    constexpr int kStatus = 1, kStart = 1;
    file_->write(event(purge_step).nested(kSessionLog, Message().varint(kStatus, kStart)));
  }
}

SummaryWriter::~SummaryWriter() = default;
SummaryWriter::SummaryWriter(SummaryWriter&&) noexcept = default;
SummaryWriter& SummaryWriter::operator=(SummaryWriter&&) noexcept = default;

void SummaryWriter::add_scalar(const std::string& tag, double value, std::int64_t step) {
  constexpr int kValue = 1, kTag = 1, kSimpleValue = 2;
  const Message scalar = Message().bytes(kTag, tag).fixed(kSimpleValue, static_cast<float>(value));
  file_->write(event(step).nested(kSummary, Message().nested(kValue, scalar)));
}

void SummaryWriter::add_text(const std::string& tag, const std::string& text, std::int64_t step) {
  // A string tensor of one element, and the name of the plugin that displays it.
  constexpr int kValue = 1, kTag = 1, kTensor = 8, kMetadata = 9;
  constexpr int kPluginData = 1, kPluginName = 1;
  constexpr int kDtype = 1, kShape = 2, kStrings = 8, kDim = 2, kDimSize = 1, kTypeString = 7;
  const Message shape = Message().nested(kDim, Message().varint(kDimSize, 1));
  const Message tensor = Message().varint(kDtype, kTypeString).nested(kShape, shape).bytes(kStrings, text);
  const Message metadata = Message().nested(kPluginData, Message().bytes(kPluginName, "text"));
  const Message value =
      Message().bytes(kTag, tag + "/text_summary").nested(kTensor, tensor).nested(kMetadata, metadata);
  file_->write(event(step).nested(kSummary, Message().nested(kValue, value)));
}

const std::filesystem::path& SummaryWriter::path() const noexcept { return file_->path; }

}  // namespace ddpkit::train
