// The main function of all test programs. Each test case runs in a forked process: a crash, an exit or a hang fails
// that case only. LibTorch is loaded once, by this process, which runs no operator and so starts no thread.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
namespace clara = Catch::Clara;
using Listener = Catch::EventListenerBase;
using AssertionEnded = void;
#else
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
namespace clara = Catch::clara;
using Listener = Catch::TestEventListenerBase;
using AssertionEnded = bool;
#endif

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "support/children.h"

namespace {

constexpr int kWrongUse = 2;
constexpr int kAllSkipped = 77;  ///< CTest's SKIP_RETURN_CODE.

int started_cases = 0;
int failed = 0;

struct Counts : Listener {
  using Listener::Listener;
  void testCaseStarting(const Catch::TestCaseInfo& info) override {
    Listener::testCaseStarting(info);
    ++started_cases;
  }
  AssertionEnded assertionEnded(const Catch::AssertionStats& stats) override {
    if (!stats.assertionResult.isOk()) ++failed;
    return AssertionEnded();
  }
};
CATCH_REGISTER_LISTENER(Counts)

struct Options {
  std::string source;
  int time_limit_s = 300;
  bool in_process = false;
};

clara::Parser with_options(const clara::Parser& parser, Options& options) {
  return parser |
         clara::Opt(options.source, "file")["--source"]("only test cases of this source, such as join_test.cpp") |
         clara::Opt(options.time_limit_s, "seconds")["--time-limit"]("of each test case (300)") |
         clara::Opt(options.in_process)["--in-process"]("run in this process, without a fork: for a debugger");
}

bool is_in(const std::string& source, const Catch::TestCaseInfo& info) {
  return source.empty() || std::filesystem::path(info.lineInfo.file).filename() == source;
}

/// Returns the names of the test cases to run. Throws std::invalid_argument if no test case matches the command line.
std::vector<std::string> selected_names(const Catch::Config& config, const std::string& source) {
  const auto& all = Catch::getAllTestCasesSorted(config);
  if (std::ranges::none_of(all, [&](const auto& test) { return is_in(source, test.getTestCaseInfo()); }))
    throw std::invalid_argument(fmt::format("no test case of this program is in '{}'", source));
  std::vector<std::string> names;
  for (const auto& test : config.hasTestFilters() ? Catch::filterTests(all, config.testSpec(), config) : all) {
    const Catch::TestCaseInfo& info = test.getTestCaseInfo();
    if (is_in(source, info) && (config.hasTestFilters() || !info.isHidden())) names.push_back(info.name);
  }
  if (names.empty() && source.empty()) throw std::invalid_argument("no test case has this name or these tags");
  return names;
}

/// Commas, brackets and asterisks are syntax in Catch2's test names.
std::string escaped(const std::string& name) {
  std::string text;
  for (const char c : name) {
    if (std::strchr(",[]\\*\"", c)) text += '\\';
    text += c;
  }
  return text;
}

int run_in_this_process(Catch::Session& session, const std::string& name) {
  Catch::ConfigData data = session.configData();
  data.testsOrTags = {escaped(name)};
  session.useConfigData(data);
  const int code = session.run();
  if (started_cases == 1) return code;
  std::cout << "Catch2 found " << started_cases << " test cases of this name instead of 1" << std::endl;
  return 1;
}

/// Returns the output of DDPKIT_SKIP; empty if the case was not skipped.
std::string skip_reason(const std::string& output) {
  constexpr std::string_view kMark = "[skipped] ";
  const auto at = output.starts_with(kMark) ? 0 : output.find("\n" + std::string(kMark));
  if (at == std::string::npos) return {};
  const auto begin = output.find(kMark, at) + kMark.size();
  return output.substr(begin, output.find('\n', begin) - begin);
}

/// Returns the exit code of this program.
int run_forked(Catch::Session& session, const Options& options) {
  const std::vector<std::string> names = selected_names(session.config(), options.source);
  const bool shows_all = names.size() == 1 || session.configData().showSuccessfulTests;
  int passed = 0, skipped = 0;
  std::vector<std::string> failures;
  for (const std::string& name : names) {
    const auto result =
        ddpkit::testing::run_children(1, [&](int) { return run_in_this_process(session, name); },
                                      {.time_limit = std::chrono::seconds(options.time_limit_s), .own_groups = true});
    const auto& end = result.ends[0];
    if (shows_all || !end.ok()) std::cout << end.output;
    if (result.timed_out) {
      failures.push_back(fmt::format("{}: did not end within {} s and was killed", name, options.time_limit_s));
    } else if (!end.ok()) {
      failures.push_back(fmt::format("{}: {} after {:.1f} s", name, end.describe(), end.seconds));
    } else if (const std::string reason = skip_reason(end.output); !reason.empty()) {
      ++skipped;
      std::cout << fmt::format("skipped: {}: {}\n", name, reason);
    } else {
      ++passed;
    }
    if (!end.ok()) std::cout << "FAILED: " << failures.back() << "\n\n";
    std::cout.flush();
  }
  // script/test sums these lines.
  std::cout << fmt::format("test cases: {} passed, {} skipped, {} failed\n", passed, skipped, failures.size());
  for (const std::string& failure : failures) std::cout << "  " << failure << "\n";
  if (!failures.empty()) return 1;
  return passed == 0 && skipped > 0 ? kAllSkipped : 0;
}

}  // namespace

int ddpkit::testing::failed_assertions() { return failed; }

int main(int argc, char** argv) {
  Options options;
  Catch::Session session;
  session.cli(with_options(session.cli(), options));
  if (const int code = session.applyCommandLine(argc, argv); code != 0) return code;
  const Catch::ConfigData& data = session.configData();
  if (options.in_process || data.showHelp || data.libIdentify || data.listTests || data.listTags || data.listReporters)
    return session.run();
  try {
    return run_forked(session, options);
  } catch (const std::invalid_argument& error) {
    std::cerr << error.what() << std::endl;
    return kWrongUse;
  }
}
