#include "pool.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>

#include <fmt/format.h>

#include "training.h"

namespace ddpkit::fuzz {
namespace {

using Clock = std::chrono::steady_clock;

/// Only a hanging case reaches this limit.
#ifdef __SANITIZE_THREAD__
constexpr std::chrono::seconds kPatience(60);
#else
constexpr std::chrono::seconds kPatience(10);
#endif
/// Each arena adds an entry to a list that each destruction of a tensor searches. So the processes are replaced after
/// this many cases.
constexpr int kCasesPerPool = 400;
constexpr std::uint32_t kReference = 0;
/// Number of runs of the reference.
constexpr std::size_t kRuns = 2, kManyRuns = 17;

void write_all(int fd, const void* data, std::size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(fd, at, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw std::system_error(errno, std::generic_category(), "write to a process of the pool");
    at += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void write_frame(int fd, const std::string& text) {
  const auto size = static_cast<std::uint64_t>(text.size());
  write_all(fd, &size, sizeof size);
  write_all(fd, text.data(), text.size());
}

/// For a worker, which may block. Empty at the end of the pipe.
std::optional<std::string> read_frame(int fd) {
  const auto read_all = [fd](void* data, std::size_t bytes) {
    auto* at = static_cast<char*>(data);
    while (bytes > 0) {
      const ssize_t got = ::read(fd, at, bytes);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return false;
      at += got;
      bytes -= static_cast<std::size_t>(got);
    }
    return true;
  };
  std::uint64_t size = 0;
  if (!read_all(&size, sizeof size)) return std::nullopt;
  std::string text(size, '\0');
  if (!read_all(text.data(), size)) return std::nullopt;
  return text;
}

std::size_t number_of_ranks(const Case& drawn) {
  return drawn.wrapper.kind == "data_parallel" ? 1 : static_cast<std::size_t>(drawn.world);
}

/// With `twice`, different bits in the second run are a failure.
Report run_as_drawn(const Case& drawn, int rank, const std::string& folder) {
  Report report = run_rank(drawn, rank, folder);
  if (!drawn.twice || report.failure != Failure::kNone) return report;
  const std::string other_folder = folder + "/twice";
  std::filesystem::create_directory(other_folder);
  if (run_rank(drawn, rank, other_folder).encoded() != report.encoded()) {
    report.failure = Failure::kOther;
    report.message = "a second run gave other bits";
  }
  return report;
}

/// Runs all ranks as threads of this process. [rank]
std::vector<Report> run_threads(const Case& drawn, const std::string& folder) {
  std::vector<Report> reports(number_of_ranks(drawn));
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < reports.size(); ++rank)
    threads.emplace_back([&, rank] { reports[rank] = run_as_drawn(drawn, static_cast<int>(rank), folder); });
  for (std::thread& thread : threads) thread.join();
  return reports;
}

[[noreturn]] void serve(std::uint32_t index, bool threads, int in, int out) {
  at::set_num_threads(1);
  while (const auto frame = read_frame(in)) {
    const auto line_end = frame->find('\n');
    const std::string argument = frame->substr(0, line_end);  // The folder; for the reference, the number of runs.
    const Case drawn = from_json(nlohmann::json::parse(frame->substr(line_end + 1)));
    std::vector<Report> reports;
    if (index == kReference) {
      const std::uint64_t runs = std::stoul(argument);
      for (std::uint64_t run = 0; run < runs; ++run) {
        const auto one = run_reference(drawn, run);
        reports.insert(reports.end(), one.begin(), one.end());
      }
    } else if (threads) {
      reports = run_threads(drawn, argument);
    } else {
      reports.push_back(run_as_drawn(drawn, static_cast<int>(index) - 1, argument));
    }
    std::string answer;
    for (const Report& report : reports) {
      const std::string one = report.encoded();
      const auto size = static_cast<std::uint64_t>(one.size());
      answer.append(reinterpret_cast<const char*>(&size), sizeof size).append(one);
    }
    write_frame(out, answer);
  }
  ::_exit(0);
}

void decode_into(std::vector<Report>& reports, const std::string& answer) {
  for (std::size_t at = 0; at < answer.size();) {
    std::uint64_t size = 0;
    std::memcpy(&size, answer.data() + at, sizeof size);
    reports.push_back(Report::decoded(answer.substr(at + sizeof size, size)));
    at += sizeof size + size;
  }
}

}  // namespace

struct Pool::Worker {
  Worker(std::uint32_t index, bool threads, const std::string& words) {
    int to[2], from[2];
    if (::pipe2(to, O_CLOEXEC) != 0 || ::pipe2(from, O_CLOEXEC) != 0)
      throw std::system_error(errno, std::generic_category(), "pipe");
    pid = ::fork();
    if (pid < 0) throw std::system_error(errno, std::generic_category(), "fork");
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      const rlimit none{0, 0};
      ::setrlimit(RLIMIT_CORE, &none);
      ::close(to[1]);
      ::close(from[0]);
      const int errors = ::open(words.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
      ::dup2(errors, STDERR_FILENO);
      ::dup2(errors, STDOUT_FILENO);
      serve(index, threads, to[0], from[1]);
    }
    ::close(to[0]);
    ::close(from[1]);
    in = to[1];
    out = from[0];
  }
  ~Worker() {
    ::close(in);
    ::close(out);
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }

  /// Reads the available data. Returns false if the process has ended.
  bool read_more() {
    char buffer[65536];
    const ssize_t got = ::read(out, buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) return true;
    if (got <= 0) return false;
    bytes.append(buffer, static_cast<std::size_t>(got));
    return true;
  }
  std::optional<std::string> frame() {
    std::uint64_t size = 0;
    if (bytes.size() < sizeof size) return std::nullopt;
    std::memcpy(&size, bytes.data(), sizeof size);
    if (bytes.size() < sizeof size + size) return std::nullopt;
    return bytes.substr(sizeof size, size);
  }

  pid_t pid = -1;
  int in = -1, out = -1;
  std::string bytes;
};

Pool::Pool(bool threads) : threads_(threads) {
  std::string pattern = (std::filesystem::temp_directory_path() / "training-fuzzer-XXXXXX").string();
  if (!::mkdtemp(pattern.data())) throw std::system_error(errno, std::generic_category(), pattern);
  folder_ = pattern;
}

Pool::~Pool() {
  workers_.clear();
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

Pool::Worker& Pool::worker(std::size_t index) {
  while (workers_.size() <= index)
    workers_.push_back(std::make_unique<Worker>(static_cast<std::uint32_t>(workers_.size()), threads_,
                                                fmt::format("{}/words-{}", folder_, workers_.size())));
  return *workers_[index];
}

void Pool::replace() {
  workers_.clear();
  cases_ = 0;
}

std::string Pool::last_words() const {
  std::string words;
  for (std::size_t i = 1; i < workers_.size(); ++i) {
    std::ifstream file(fmt::format("{}/words-{}", folder_, i));
    std::ostringstream text;
    text << file.rdbuf();
    const std::string all = text.str();
    if (!all.empty())
      words +=
          fmt::format("; {} wrote: {}", name_of(i), all.substr(all.size() - std::min<std::size_t>(all.size(), 300)));
  }
  return words;
}

std::string Pool::name_of(std::size_t process) const {
  if (process == kReference) return "the reference";
  return threads_ ? "the process of all ranks" : fmt::format("rank {}", process - 1);
}

Verdict Pool::run(const Case& drawn) {
  Case ours = drawn;
  // Collectives of several gloo groups in one process insert into a map of LibTorch 2.11 without a lock.
  if (threads_) ours.backend = "shm";
  const Verdict verdict = run(ours, kRuns);
  // If the model has a kink near the values, only few runs of the reference may show it.
  return verdict.kind.rfind("WRONG", 0) == 0 ? run(ours, kManyRuns) : verdict;
}

Verdict Pool::run(const Case& drawn, std::size_t runs) {
  if (++cases_ > kCasesPerPool) replace();
  const std::size_t processes = threads_ ? 1 : number_of_ranks(drawn);  // Not counting the reference.
  // Each case has a new folder. After an error in backward, LibTorch's ready queue keeps nodes until the thread's next
  // backward. These nodes can hold the process group of the failed case. If the next case had the same store file,
  // ~FileStore() would lock the file and read past its end forever.
  std::filesystem::remove_all(case_folder_);
  case_folder_ = fmt::format("{}/case-{}", folder_, ++case_number_);
  std::filesystem::create_directory(case_folder_);
  const std::string text = "\n" + to_json(drawn).dump();
  for (std::size_t i = 0; i <= processes; ++i) {
    worker(i).bytes.clear();
    write_frame(worker(i).in, (i == kReference ? std::to_string(runs) : case_folder_) + text);
  }
  const auto deadline = Clock::now() + kPatience;
  std::vector<std::optional<std::string>> answers(processes + 1);
  for (;;) {
    std::vector<pollfd> waited;
    std::vector<std::size_t> indices;
    for (std::size_t i = 0; i <= processes; ++i) {
      if (answers[i]) continue;
      waited.push_back({worker(i).out, POLLIN, 0});
      indices.push_back(i);
    }
    if (waited.empty()) break;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) {
      std::string silent;
      for (const std::size_t i : indices) silent += (silent.empty() ? "" : ", ") + name_of(i);
      replace();
      return {"HANG", fmt::format("no answer from {} within {} s", silent, kPatience.count())};
    }
    ::poll(waited.data(), waited.size(), static_cast<int>(left));
    for (std::size_t at = 0; at < waited.size(); ++at) {
      if (waited[at].revents == 0) continue;
      Worker& one = worker(indices[at]);
      if (!one.read_more()) {
        int status = 0;
        ::waitpid(one.pid, &status, 0);
        const std::string end = WIFSIGNALED(status) ? fmt::format("was killed by signal {} ({})", WTERMSIG(status),
                                                                  ::strsignal(WTERMSIG(status)))
                                                    : fmt::format("ended with exit code {}", WEXITSTATUS(status));
        const Verdict verdict{"CRASH", name_of(indices[at]) + " " + end + last_words()};
        replace();
        return verdict;
      }
      answers[indices[at]] = one.frame();
    }
  }
  std::vector<Report> reports, reference;
  decode_into(reference, *answers[kReference]);
  std::vector<std::vector<Report>> references;
  for (auto at = reference.begin(); at != reference.end(); at += drawn.world)
    references.emplace_back(at, at + drawn.world);
  try {
    for (std::size_t i = 1; i <= processes; ++i) decode_into(reports, *answers[i]);
  } catch (const std::runtime_error& error) {
    const Verdict verdict{"CRASH", error.what() + last_words()};
    replace();
    return verdict;
  }
  return judge(drawn, reports, references);
}

}  // namespace ddpkit::fuzz
