// tests/peers/tensorboard.py checks that TensorBoard reads the files.
#include <ddpkit/train/summary_writer.h>

#include <cstring>

#include <ddpkit/error.h>

#include "support/catch.h"
#include "support/folder.h"

using ddpkit::testing::Folder;
using ddpkit::testing::names_in;
using ddpkit::testing::read_file;
using ddpkit::testing::write_file;
using ddpkit::train::SummaryWriter;

namespace {

// Returns the data of a TFRecord file's records; reads only their lengths.
std::vector<std::string> records(const std::string& bytes) {
  std::vector<std::string> found;
  std::size_t at = 0;
  while (at < bytes.size()) {
    std::uint64_t length = 0;
    REQUIRE(at + 12 <= bytes.size());
    std::memcpy(&length, bytes.data() + at, 8);
    REQUIRE(at + 16 + length <= bytes.size());
    found.push_back(bytes.substr(at + 12, length));
    at += 16 + length;
  }
  return found;
}

}  // namespace

TEST_CASE("an event file is a sequence of records", "[summary_writer]") {
  const Folder folder;
  SummaryWriter writer(folder / "a/tensorboard");
  writer.add_scalar("loss/train", 0.5, 3);
  writer.add_text("config", "lr 0.1", 0);
  CHECK(names_in(folder / "a/tensorboard").size() == 1);
  const std::string bytes = read_file(writer.path());
  const auto found = records(bytes);
  REQUIRE(found.size() == 3);
  CHECK_THAT(found[0], ContainsSubstring("brain.Event:2"));
  // Step 3, then the summary: tag and value as a float.
  CHECK_THAT(found[1], ContainsSubstring(std::string("\x10\x03\x2a", 3)));
  CHECK_THAT(found[1], ContainsSubstring("\x0a\x0aloss/train") && ContainsSubstring(std::string("\x15\0\0\0\x3f", 5)));
  CHECK_THAT(found[2], ContainsSubstring("config/text_summary") && ContainsSubstring("lr 0.1"));
  // TensorFlow's files give the masked CRC-32C of a record of 24 bytes.
  const std::uint64_t length = found[0].size();
  CHECK(length == 24);
  CHECK(bytes.substr(8, 4) == "\xa3\x7f\x4b\x22");
}

TEST_CASE("a resumed run's events take the place of those after its step", "[summary_writer]") {
  const Folder folder;
  SummaryWriter first(folder.path());
  SummaryWriter second(folder.path(), 40);
  CHECK(names_in(folder.path()).size() == 2);
  CHECK(first.path() < second.path());
  const auto found = records(read_file(second.path()));
  REQUIRE(found.size() == 2);
  CHECK_THAT(found[1], ContainsSubstring(std::string("\x10\x28\x3a\x02\x08\x01", 6)));  // Step 40, SessionLog START.
}

TEST_CASE("a folder that cannot be written to is an error with the reason", "[summary_writer]") {
  const Folder folder;
  write_file(folder / "file", "x");
  CHECK_THROWS_WITH(SummaryWriter(folder / "file/events"), ContainsSubstring("cannot make the folder"));
  CHECK_THROWS_AS(SummaryWriter("/proc/none"), ddpkit::Error);
}
