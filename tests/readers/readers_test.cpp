// For any layout of a data set on disk, a trainer reads all of it or rejects it with an error that names the file.
#include <algorithm>
#include <functional>
#include <set>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "readers/formats.h"
#include "support/catch.h"
#include "support/seed.h"

using namespace ddpkit::testing;

namespace {

/// `fault`: description of the fault; empty if there is none.
void check(const std::string& property, const std::string& fault) {
  CAPTURE(property, fault);
  CHECK(fault.empty());
}

std::vector<Format> formats() {
  return {ucihar_format(), ts_format(), prices_format(), librispeech_format(), manifest_format(), video_format()};
}

struct Reading {
  std::string text;     ///< The result of the reader.
  std::string refusal;  ///< The error, if the reader threw.
};

Reading read(const Format& format, const Path& folder) {
  try {
    return {.text = format.read(folder), .refusal = {}};
  } catch (const ddpkit::Error& error) {
    return {.text = {}, .refusal = error.what()};
  }
}

/// Returns the difference between a reading and `expected`.
std::string difference(const Reading& reading, const std::string& expected) {
  if (!reading.refusal.empty()) return "refused: " + reading.refusal;
  return reading.text == expected ? "" : fmt::format("read:\n{}instead of:\n{}", reading.text, expected);
}

std::vector<Path> files_in(const Path& folder) {
  std::vector<Path> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

void rewrite(const Format& format, const Path& folder, const std::function<std::string(std::string)>& change) {
  for (const Path& file : files_in(folder)) {
    const bool is_text = std::any_of(format.text_files.begin(), format.text_files.end(),
                                     [&](const std::string& ending) { return file.string().ends_with(ending); });
    if (is_text) write_file(file, change(read_file(file)));
  }
}

std::string with_crlf(const std::string& text) {
  std::string changed;
  for (const char c : text) changed += c == '\n' ? std::string("\r\n") : std::string(1, c);
  return changed;
}

/// Moves `path` to `elsewhere` and replaces it with a link.
void link_from(const Path& path, const Path& elsewhere) {
  std::filesystem::create_directories(elsewhere);
  const Path moved = elsewhere / fmt::format("{}", std::distance(std::filesystem::directory_iterator(elsewhere), {}));
  std::filesystem::rename(path, moved);
  std::filesystem::create_symlink(moved, path);
}

/// A variation of a data set on disk that does not change its content.
struct Guise {
  std::string name;
  std::function<void(const Format& format, const Path& folder, const Path& elsewhere)> put_on;
};

const std::vector<Guise> kGuises = {
    {"with byte-order marks",
     [](const Format& format, const Path& folder, const Path&) {
       rewrite(format, folder, [](const std::string& text) { return "\xEF\xBB\xBF" + text; });
     }},
    {"with CR LF", [](const Format& format, const Path& folder, const Path&) { rewrite(format, folder, with_crlf); }},
    {"without a last line end",
     [](const Format& format, const Path& folder, const Path&) {
       rewrite(format, folder, [](const std::string& text) { return text.substr(0, text.size() - 1); });
     }},
    {"with empty lines at the end",
     [](const Format& format, const Path& folder, const Path&) {
       rewrite(format, folder, [](const std::string& text) { return text + "\n\n"; });
     }},
    {"with linked files",
     [](const Format&, const Path& folder, const Path& elsewhere) {
       for (const Path& file : files_in(folder)) link_from(file, elsewhere);
     }},
    {"with linked folders",
     [](const Format&, const Path& folder, const Path& elsewhere) {
       for (const std::string& name : names_in(folder)) {
         if (std::filesystem::is_directory(folder / name)) link_from(folder / name, elsewhere);
       }
     }},
    {"behind a link", [](const Format&, const Path& folder, const Path& elsewhere) { link_from(folder, elsewhere); }},
    {"beside ._ files",
     [](const Format&, const Path& folder, const Path&) {
       for (const Path& file : files_in(folder))
         write_file(file.parent_path() / ("._" + file.filename().string()),
                    std::string("\0\5\x16\7\0\2\0\0Mac OS X", 16));
     }},
    {"beside other files",
     [](const Format&, const Path& folder, const Path&) {
       for (const char* name : {".DS_Store", "README.md", "__MACOSX/x", "Thumbs.db"})
         write_file(folder / name, "\1x\n");
     }},
};

}  // namespace

TEST_CASE("readers use all that was written", "[readers]") {
  std::mt19937 random(static_cast<unsigned>(seed_of_this_run()));
  for (const Format& format : formats()) {
    for (int round = 0; round < 4; ++round) {
      const Folder folder;
      const std::string expected = format.write(folder / "set", random);
      check(format.name, difference(read(format, folder / "set"), expected));
    }
  }
}

TEST_CASE("readers accept byte-order marks, line ends, links and foreign files", "[readers]") {
  std::mt19937 random(static_cast<unsigned>(seed_of_this_run()));
  for (const Format& format : formats()) {
    for (const Guise& guise : kGuises) {
      const Folder folder;
      const std::string expected = format.write(folder / "set", random);
      guise.put_on(format, folder / "set", folder / "elsewhere");
      check(format.name + " " + guise.name, difference(read(format, folder / "set"), expected));
    }
  }
}

TEST_CASE("readers use or name a file whose ending is in capitals", "[readers]") {
  std::mt19937 random(static_cast<unsigned>(seed_of_this_run()));
  for (const Format& format : formats()) {
    std::set<std::string> endings;  // One file of each kind.
    for (bool found = true; std::exchange(found, false);) {
      const Folder folder;
      const std::string expected = format.write(folder / "set", random);
      for (const Path& file : files_in(folder / "set")) {
        const std::string name = file.filename().string(), ending = name.substr(name.find('.'));
        if (!endings.insert(ending).second) continue;
        std::string capitals = ending;
        for (char& c : capitals) c = static_cast<char>(std::toupper(c));
        std::filesystem::rename(file, file.parent_path() / (name.substr(0, name.find('.')) + capitals));
        const Reading reading = read(format, folder / "set");
        const bool named = reading.refusal.find(name) != std::string::npos;
        check(fmt::format("{} with an ending {}", format.name, capitals), named ? "" : difference(reading, expected));
        found = true;
        break;
      }
    }
  }
}

TEST_CASE("each key of a format changes what is read, or is refused by name", "[readers]") {
  std::mt19937 random(static_cast<unsigned>(seed_of_this_run()));
  for (const Format& format : formats()) {
    for (const Edit& edit : format.edits) {
      const Folder folder;
      const std::string expected = format.write(folder / "set", random);
      std::string text = read_file(folder / "set" / edit.file);
      const std::size_t at = text.find(edit.from);
      REQUIRE(at != std::string::npos);
      write_file(folder / "set" / edit.file, text.replace(at, edit.from.size(), edit.to));
      const Reading reading = read(format, folder / "set");
      std::string fault;
      if (reading.refusal.empty() && reading.text == expected) fault = "is ignored";
      if (!reading.refusal.empty() && reading.refusal.find(edit.named) == std::string::npos)
        fault = "is not named: " + reading.refusal;
      check(fmt::format("{}: {}", format.name, edit.to.substr(0, edit.to.find('\n'))), fault);
    }
  }
}

TEST_CASE("prices outside of Low to High are refused", "[readers]") {
  for (const auto& [name, row] :
       {std::pair("Close above High", "10,11,9,12,1"), std::pair("Open below Low", "8,11,9,10,1")}) {
    const Folder folder;
    write_file(folder / "A.csv",
               fmt::format("Date,Open,High,Low,Close,Volume\n2024-01-01,10,11,9,10,1\n2024-01-02,{}\n", row));
    check(fmt::format("prices: {}", name), read(prices_format(), folder.path()).refusal.empty() ? "accepted" : "");
  }
}
