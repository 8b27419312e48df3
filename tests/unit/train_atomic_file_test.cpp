#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <filesystem>
#include <iterator>

#include <ddpkit/error.h>
#include <ddpkit/train/atomic_file.h>

#include "support/catch.h"
#include "support/folder.h"

using ddpkit::testing::Folder;
using ddpkit::testing::names_in;
using ddpkit::testing::read_file;
using ddpkit::testing::write_file;
using ddpkit::train::AtomicFile;

TEST_CASE("an atomic file appears only when it is committed", "[atomic_file]") {
  const Folder folder;
  write_file(folder / "file", "old");
  {
    AtomicFile file(folder / "file");
    file.write("new", 3);
    CHECK(read_file(folder / "file") == "old");
    file.commit();
  }
  CHECK(read_file(folder / "file") == "new");
  CHECK(names_in(folder.path()) == std::vector<std::string>{"file"});
}

TEST_CASE("an aborted atomic file leaves the old file and no temporary file", "[atomic_file]") {
  const Folder folder;
  write_file(folder / "file", "old");
  {
    AtomicFile file(folder / "file");
    file.write("half of the n", 13);
  }
  CHECK(read_file(folder / "file") == "old");
  CHECK(names_in(folder.path()) == std::vector<std::string>{"file"});
}

TEST_CASE("a killed writer's temporary file does not block the next writer", "[atomic_file]") {
  const Folder folder;
  write_file(folder / "file.tmp", "a much longer text than the new one");
  AtomicFile file(folder / "file");
  file.write("new", 3);
  file.commit();
  CHECK(read_file(folder / "file") == "new");
}

TEST_CASE("two writers of one file at the same time are refused by the file's name", "[atomic_file]") {
  const Folder folder;
  {
    AtomicFile first(folder / "file");
    first.write("first", 5);
    CHECK_THROWS_WITH(AtomicFile(folder / "file"), ContainsSubstring("file is being written by another process") &&
                                                       ContainsSubstring("group.rank()"));
    first.commit();
    CHECK(read_file(folder / "file") == "first");
    AtomicFile second(folder / "file");
    second.write("second", 6);
    second.commit();
    CHECK(read_file(folder / "file") == "second");
  }
  CHECK(names_in(folder.path()) == std::vector<std::string>{"file"});
}

TEST_CASE("a full disk leaves the old file and is reported", "[atomic_file]") {
  const Folder folder;
  write_file(folder / "file", "old");
  // A limit on file sizes fails like a full disk, without root or a separate file system.
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{1000, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string data(5000, 'x');
  std::string message;
  try {
    AtomicFile file(folder / "file");
    file.write(data.data(), data.size());
    file.commit();
  } catch (const ddpkit::Error& error) {
    message = error.what();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  CHECK_THAT(message, ContainsSubstring("cannot write") && ContainsSubstring("File too large"));
  CHECK(read_file(folder / "file") == "old");
  CHECK(names_in(folder.path()) == std::vector<std::string>{"file"});
}

TEST_CASE("an atomic file in a missing folder is an error", "[atomic_file]") {
  CHECK_THROWS_WITH(AtomicFile("/nonexistent/folder/file"),
                    ContainsSubstring("/nonexistent/folder/file") && ContainsSubstring("No such file or directory"));
}

TEST_CASE("an atomic file replaces only plain files", "[atomic_file]") {
  const Folder folder;
  const auto pipe = folder / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  CHECK_THROWS_WITH(AtomicFile(pipe), pipe.string() + " is no plain file, which another could replace");
  CHECK(std::filesystem::is_fifo(pipe));
  CHECK_THROWS_AS(AtomicFile(folder.path()), ddpkit::InvalidArgument);
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 1);
}
