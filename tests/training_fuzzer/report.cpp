#include "report.h"

#include <cstring>
#include <stdexcept>

namespace ddpkit::fuzz {
namespace {

template <class T>
void put(std::string& bytes, const T& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}
void put(std::string& bytes, const std::string& text) {
  put(bytes, static_cast<std::uint32_t>(text.size()));
  bytes += text;
}

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}
  template <class T>
  T get() {
    T value;
    take(&value, sizeof value);
    return value;
  }
  /// Reads the number of following elements, each of at least `bytes_each` bytes. A rank with damaged memory may send
  /// any number.
  std::uint32_t count(std::size_t bytes_each) {
    const auto value = get<std::uint32_t>();
    if (value > (bytes_.size() - at_) / bytes_each) throw std::runtime_error("a report is truncated");
    return value;
  }
  std::string text() {
    std::string value(count(1), '\0');
    take(value.data(), value.size());
    return value;
  }
  void take(void* to, std::size_t count) {
    if (count > bytes_.size() - at_) throw std::runtime_error("a report is truncated");
    std::memcpy(to, bytes_.data() + at_, count);
    at_ += count;
  }

 private:
  const std::string& bytes_;
  std::size_t at_ = 0;
};

}  // namespace

std::string Report::encoded() const {
  std::string bytes;
  put(bytes, static_cast<std::uint32_t>(entries.size()));
  for (const Entry& entry : entries) {
    put(bytes, entry.event);
    put(bytes, entry.kind);
    put(bytes, entry.name);
    put(bytes, static_cast<std::uint32_t>(entry.values.size()));
    bytes.append(reinterpret_cast<const char*>(entry.values.data()), entry.values.size() * sizeof(double));
  }
  put(bytes, failure);
  put(bytes, failed_event);
  put(bytes, message);
  return bytes;
}

Report Report::decoded(const std::string& bytes) {
  Reader reader(bytes);
  Report report;
  report.entries.resize(reader.count(sizeof(Entry::event)));
  for (Entry& entry : report.entries) {
    entry.event = reader.get<std::uint32_t>();
    entry.kind = reader.get<Kind>();
    entry.name = reader.text();
    entry.values.resize(reader.count(sizeof(double)));
    reader.take(entry.values.data(), entry.values.size() * sizeof(double));
  }
  report.failure = reader.get<Failure>();
  report.failed_event = reader.get<std::uint32_t>();
  report.message = reader.text();
  return report;
}

}  // namespace ddpkit::fuzz
