#include "faults/fault_run.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

#include <fmt/format.h>

#include "support/catch.h"

namespace ddpkit::testing {
namespace {

using Clock = std::chrono::steady_clock;
constexpr const char* kMark = "DDPKIT_TEST_FAULT";

/// Returns the processes with `text` in their /proc/PID/NAME.
std::vector<int> processes_with(const char* name, const std::string& text) {
  std::vector<int> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const int pid = std::atoi(entry.path().filename().c_str());
    if (pid <= 0) continue;
    std::ostringstream content;  // Empty if the process has ended.
    content << std::ifstream(entry.path() / name, std::ios::binary).rdbuf();
    if (content.str().find(text) != std::string::npos) found.push_back(pid);
  }
  return found;
}

/// Runs between fork and exec. Under nohup, a test inherits ignored signals.
void reset_signals() {
  for (int number = 1; number < NSIG; ++number) ::signal(number, SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

}  // namespace

FaultRun::FaultRun(const std::vector<std::string>& arguments, const std::vector<std::string>& prefix) {
  static int number = 0;
  mark_ = fmt::format("{}={}-{}", kMark, ::getpid(), number++);
  std::vector<std::string> command = prefix;
  command.push_back(DDPKIT_TEST_CLI);
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& argument : command) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  const std::string out = folder_ / "out", err = folder_ / "err";
  const std::string value = mark_.substr(mark_.find('=') + 1);
  pid_ = ::fork();
  REQUIRE(pid_ >= 0);
  if (pid_ > 0) return;
  reset_signals();
  const auto redirect = [](const std::string& path, int fd) {
    ::dup2(::open(path.c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600), fd);
  };
  redirect(out, STDOUT_FILENO);
  redirect(err, STDERR_FILENO);
  ::dup2(::open("/dev/null", O_RDONLY), STDIN_FILENO);
  ::setenv(kMark, value.c_str(), 1);
  ::execvp(pointers[0], pointers.data());
  ::_exit(127);
}

FaultRun::~FaultRun() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  for (const int pid : processes_with("environ", mark_)) ::kill(pid, SIGKILL);
}

int FaultRun::wait(std::chrono::seconds limit) {
  const std::optional<int> code = ended_within(limit);
  if (!code) FAIL("the run hangs; its output so far:\n" << out() << err());
  return *code;
}

std::optional<int> FaultRun::ended_within(std::chrono::seconds limit) {
  const auto deadline = Clock::now() + limit;
  int status = 0;
  while (::waitpid(pid_, &status, WNOHANG) != pid_) {
    if (Clock::now() > deadline) return std::nullopt;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  pid_ = -1;
  seconds_ = std::chrono::duration<double>(Clock::now() - start_).count();
  ended_at_ = now_seconds();
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

void FaultRun::wait_for(const std::string& text, std::chrono::seconds limit) const {
  const auto deadline = Clock::now() + limit;
  const auto has_text = [&] {
    return std::filesystem::exists(folder_ / "err") && (out() + err()).find(text) != std::string::npos;
  };
  while (!has_text()) {
    if (Clock::now() > deadline) FAIL("the output never contained \"" << text << "\":\n" << out() << err());
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

std::vector<int> FaultRun::orphans() const {
  const auto deadline = Clock::now() + std::chrono::seconds(10);
  std::vector<int> left;
  while (!(left = processes_with("environ", mark_)).empty() && Clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  return left;
}

std::optional<double> FaultFolder::time_of(const std::string& name) const {
  double time = 0;
  return std::ifstream(*this / name) >> time ? std::optional(time) : std::nullopt;
}

std::string FaultFolder::text_of(const std::string& name) const {
  return std::filesystem::exists(*this / name) ? read_file(*this / name) : std::string();
}

int FaultFolder::pid_of(int rank) const {
  const auto deadline = Clock::now() + std::chrono::seconds(30);
  for (;;) {
    int pid = 0;
    if (std::ifstream(*this / fmt::format("pid-{}", rank)) >> pid) return pid;
    if (Clock::now() > deadline) FAIL("rank " << rank << " did not start");
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

std::optional<double> FaultFolder::named_after(int rank) const {
  const auto fault = time_of("fault"), named = time_of(fmt::format("named-{}", rank));
  return fault && named ? std::optional(*named - *fault) : std::nullopt;
}

double FaultFolder::ended_after(const FaultRun& run) const {
  const auto fault = time_of("fault");
  REQUIRE(fault.has_value());
  return run.ended_at() - *fault;
}

std::vector<int> FaultFolder::memory_holders() const {
  std::vector<int> holders;
  int lists = 0, regions = 0;
  for (const std::string& name : names_in(path())) {
    if (!name.starts_with("memory-")) continue;
    ++lists;
    std::ifstream file(*this / name);
    for (std::string region; std::getline(file, region); ++regions) {
      for (const int pid : processes_with("maps", region)) holders.push_back(pid);
    }
  }
  CHECK((lists == 0 || regions > 0));
  return holders;
}

std::vector<std::string> worker_command(const FaultFolder& folder, const std::vector<std::string>& launcher,
                                        const std::vector<std::string>& options) {
  std::vector<std::string> arguments = {"run"};
  arguments.insert(arguments.end(), launcher.begin(), launcher.end());
  arguments.insert(arguments.end(), {"--", DDPKIT_TEST_FAULT_WORKER, "--folder", folder.path().string()});
  arguments.insert(arguments.end(), options.begin(), options.end());
  return arguments;
}

double now_seconds() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

void add_row(const std::string& fault, const std::string& promise, double seconds) {
  const std::string row = fmt::format("{:<40} {:<62} {:>7.2f} s\n", fault, promise, seconds);
  std::cout << row << std::flush;
  std::ofstream(DDPKIT_TEST_FAULT_TABLE, std::ios::app) << row;
}

}  // namespace ddpkit::testing
