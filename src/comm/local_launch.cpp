#include <ddpkit/comm/local_launch.h>

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <map>

#include <fmt/format.h>

#include <ddpkit/comm/error.h>

extern char** environ;

namespace ddpkit {
namespace {

using Clock = std::chrono::steady_clock;

/// A port that nobody listens on now. Another program may take it before rank 0 does; then rank 0 says so.
int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  const bool bound = fd >= 0 && ::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
                     ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  if (fd >= 0) ::close(fd);
  if (!bound) throw Error(fmt::format("no free TCP port on 127.0.0.1: {}", std::strerror(errno)));
  return ntohs(address.sin_port);
}

/// One end of a pipe from a rank, cut into lines.
struct OutputPipe {
  int fd = -1;
  int rank = 0;
  bool is_error = false;
  std::string pending = {};
};

struct Child {
  int rank = 0;
  pid_t pid = -1;
  bool running = false;
};

volatile std::sig_atomic_t received_signal = 0;

void note_signal(int number) { received_signal = number; }

/// Notes SIGINT and SIGTERM instead of dying of them, while it lives.
class SignalNotes {
 public:
  explicit SignalNotes(bool active) : active_(active) {
    if (!active_) return;
    received_signal = 0;
    struct sigaction action {};
    action.sa_handler = note_signal;
    ::sigaction(SIGINT, &action, &before_[0]);
    ::sigaction(SIGTERM, &action, &before_[1]);
  }
  ~SignalNotes() {
    if (!active_) return;
    ::sigaction(SIGINT, &before_[0], nullptr);
    ::sigaction(SIGTERM, &before_[1], nullptr);
  }
  SignalNotes(const SignalNotes&) = delete;
  SignalNotes& operator=(const SignalNotes&) = delete;
  int take() const {
    if (!active_) return 0;
    const int number = received_signal;
    received_signal = 0;
    return number;
  }

 private:
  bool active_;
  struct sigaction before_[2]{};
};

class Launch {
 public:
  explicit Launch(const LocalLaunchOptions& options) : options_(options) {
    result_.ranks.resize(static_cast<std::size_t>(options.ranks));
  }
  ~Launch() {
    for (const Child& child : children_) {
      if (child.running) {
        ::kill(child.pid, SIGKILL);
        ::waitpid(child.pid, nullptr, 0);
      }
    }
    for (const OutputPipe& pipe : pipes_) ::close(pipe.fd);
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  LocalLaunchResult run() {
    const SignalNotes signals(options_.forward_signals);
    const int port = options_.master_port > 0 ? options_.master_port : free_port();
    for (int rank = 0; rank < options_.ranks; ++rank) start(rank, port);
    const auto start_time = Clock::now();
    while (running() > 0 || !pipes_.empty()) {
      read_output();
      reap();
      if (const int number = signals.take()) {
        result_.stopped_by_signal = number;
        stop(number);
      }
      if (!result_.timed_out && options_.time_limit && Clock::now() - start_time > *options_.time_limit &&
          running() > 0) {
        result_.timed_out = true;
        stop(SIGTERM);
      }
      if (kill_at_ && Clock::now() > *kill_at_) {
        signal_all(SIGKILL);
        kill_at_.reset();
        pipes_close_at_ = Clock::now() + std::chrono::seconds(1);
      }
      // A grandchild that outlives its rank may hold a pipe open: its output is not waited for.
      if (running() == 0) {
        if (!pipes_close_at_) pipes_close_at_ = Clock::now() + std::chrono::milliseconds(500);
        if (Clock::now() > *pipes_close_at_) close_pipes();
      }
    }
    return std::move(result_);
  }

 private:
  std::vector<std::string> environment_of(int rank, int port) const {
    std::map<std::string, std::string> variables;
    for (char** at = environ; *at; ++at) {
      const std::string entry = *at;
      const auto equals = entry.find('=');
      if (equals != std::string::npos) variables[entry.substr(0, equals)] = entry.substr(equals + 1);
    }
    const std::string ranks = std::to_string(options_.ranks);
    variables["RANK"] = std::to_string(options_.node_rank * options_.ranks + rank);
    variables["LOCAL_RANK"] = std::to_string(rank);
    variables["WORLD_SIZE"] = std::to_string(options_.nodes * options_.ranks);
    variables["LOCAL_WORLD_SIZE"] = ranks;
    variables["MASTER_ADDR"] = options_.master_addr;
    variables["MASTER_PORT"] = std::to_string(port);
    // The same on all hosts, which know nothing of one another but where to meet.
    variables["TORCHELASTIC_RUN_ID"] =
        options_.nodes > 1 ? fmt::format("nodes-{}", port) : fmt::format("local-{}", ::getpid());
    variables.erase("TORCHELASTIC_USE_AGENT_STORE");
    variables.emplace("OMP_NUM_THREADS", std::to_string(std::max(1, available_cores() / options_.ranks)));
    for (const auto& [name, value] : options_.environment) variables[name] = value;
    std::vector<std::string> entries;
    for (const auto& [name, value] : variables) entries.push_back(name + "=" + value);
    return entries;
  }

  void start(int rank, int port) {
    const bool captured = options_.on_output || rank > 0;
    int out[2] = {-1, -1}, err[2] = {-1, -1}, report[2] = {-1, -1};
    const bool piped = !captured || (::pipe2(out, O_CLOEXEC) == 0 && ::pipe2(err, O_CLOEXEC) == 0);
    if (!piped || ::pipe2(report, O_CLOEXEC) != 0) throw Error(fmt::format("no pipe: {}", std::strerror(errno)));
    // Everything that allocates happens before fork.
    std::vector<std::string> entries = environment_of(rank, port);
    std::vector<char*> environment, arguments;
    for (auto& entry : entries) environment.push_back(entry.data());
    environment.push_back(nullptr);
    for (const auto& argument : options_.command) arguments.push_back(const_cast<char*>(argument.c_str()));
    arguments.push_back(nullptr);
    const pid_t parent = ::getpid();
    const pid_t pid = ::fork();
    if (pid < 0) throw Error(fmt::format("cannot start rank {}: {}", rank, std::strerror(errno)));
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // No rank outlives its launcher, however that ends.
      if (::getppid() != parent) ::_exit(127);
      if (captured) {
        ::dup2(out[1], STDOUT_FILENO);
        ::dup2(err[1], STDERR_FILENO);
        const int null = ::open("/dev/null", O_RDONLY);
        if (null >= 0) ::dup2(null, STDIN_FILENO);
      }
      ::execvpe(arguments[0], arguments.data(), environment.data());
      const int error = errno;
      [[maybe_unused]] const auto written = ::write(report[1], &error, sizeof error);
      ::_exit(127);
    }
    ::close(report[1]);
    if (captured) {
      ::close(out[1]);
      ::close(err[1]);
      pipes_.push_back({out[0], rank, false});
      pipes_.push_back({err[0], rank, true});
    }
    int error = 0;
    const auto got = ::read(report[0], &error, sizeof error);
    ::close(report[0]);
    children_.push_back({rank, pid, true});
    if (got == sizeof error)
      throw InvalidArgument(fmt::format("cannot start \"{}\": {}", options_.command[0], std::strerror(error)));
  }

  int running() const {
    int count = 0;
    for (const Child& child : children_) count += child.running ? 1 : 0;
    return count;
  }

  void reap() {
    for (Child& child : children_) {
      int status = 0;
      if (!child.running || ::waitpid(child.pid, &status, WNOHANG) != child.pid) continue;
      child.running = false;
      RankExit& end = result_.ranks[static_cast<std::size_t>(child.rank)];
      end.rank = child.rank;
      end.pid = child.pid;
      end.ended_by_launcher = stopping_;
      if (WIFSIGNALED(status)) {
        end.signal = WTERMSIG(status);
      } else {
        end.exit_code = WEXITSTATUS(status);
      }
      if (end.ok() || stopping_ || result_.first_failure) continue;
      result_.first_failure = end;
      if (options_.stop_on_failure) stop(SIGTERM);
    }
  }

  void stop(int number) {
    stopping_ = true;
    signal_all(number);
    if (!kill_at_) kill_at_ = Clock::now() + options_.grace;
  }

  void signal_all(int number) const {
    for (const Child& child : children_) {
      if (child.running) ::kill(child.pid, number);
    }
  }

  void read_output() {
    std::vector<pollfd> descriptors;
    for (const OutputPipe& pipe : pipes_) descriptors.push_back({pipe.fd, POLLIN, 0});
    // Short enough that an exit is seen soon, long enough to cost nothing.
    if (::poll(descriptors.data(), descriptors.size(), 10) <= 0) return;
    for (std::size_t i = descriptors.size(); i-- > 0;) {
      if (descriptors[i].revents == 0) continue;
      char buffer[16384];
      const auto got = ::read(pipes_[i].fd, buffer, sizeof buffer);
      if (got > 0) {
        take(pipes_[i], std::string_view(buffer, static_cast<std::size_t>(got)));
      } else if (got == 0 || errno != EINTR) {
        close_pipe(i);
      }
    }
  }

  void take(OutputPipe& pipe, std::string_view text) {
    if (options_.on_output) return options_.on_output(pipe.rank, std::string(text));
    pipe.pending += text;
    const auto end = pipe.pending.rfind('\n');
    if (end == std::string::npos) return;
    print(pipe, pipe.pending.substr(0, end + 1));
    pipe.pending.erase(0, end + 1);
  }

  void print(const OutputPipe& pipe, std::string_view lines) const {
    std::string text;
    while (!lines.empty()) {
      const auto end = std::min(lines.find('\n'), lines.size() - 1);
      text += fmt::format("[rank {}] {}", pipe.rank, lines.substr(0, end + 1));
      lines.remove_prefix(end + 1);
    }
    // To stderr both: stdout belongs to rank 0, whose output others may parse.
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
  }

  void close_pipe(std::size_t index) {
    OutputPipe& pipe = pipes_[index];
    if (!pipe.pending.empty()) print(pipe, pipe.pending + "\n");
    ::close(pipe.fd);
    pipes_.erase(pipes_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  void close_pipes() {
    while (!pipes_.empty()) close_pipe(pipes_.size() - 1);
  }

  const LocalLaunchOptions& options_;
  LocalLaunchResult result_;
  std::vector<Child> children_;
  std::vector<OutputPipe> pipes_;
  bool stopping_ = false;
  std::optional<Clock::time_point> kill_at_;
  std::optional<Clock::time_point> pipes_close_at_;
};

}  // namespace

std::string RankExit::describe() const {
  if (signal != 0) return fmt::format("was killed by signal {} ({})", signal, ::strsignal(signal));
  return fmt::format("exited with code {}", exit_code);
}

int LocalLaunchResult::exit_code() const noexcept {
  if (first_failure) return first_failure->signal != 0 ? 128 + first_failure->signal : first_failure->exit_code;
  if (timed_out) return 124;
  if (stopped_by_signal != 0) {
    // Ranks that end cleanly when told to have done what was asked of them.
    for (const RankExit& end : ranks) {
      if (!end.ok()) return 128 + stopped_by_signal;
    }
  }
  return 0;
}

LocalLaunchResult local_launch(const LocalLaunchOptions& options) {
  if (options.ranks < 1) throw InvalidArgument(fmt::format("{} ranks cannot be started: at least 1", options.ranks));
  if (options.command.empty()) throw InvalidArgument("there is no program to start");
  if (options.nodes < 1 || options.node_rank < 0 || options.node_rank >= options.nodes)
    throw InvalidArgument(fmt::format("there is no host {} among {}", options.node_rank, options.nodes));
  if (options.nodes > 1 && (options.master_port == 0 || options.master_addr == "127.0.0.1"))
    throw InvalidArgument(fmt::format("{} hosts need the address and the port of host 0 to meet at", options.nodes));
  return Launch(options).run();
}

int available_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (::sched_getaffinity(0, sizeof cores, &cores) != 0) return 1;
  return std::max(1, CPU_COUNT(&cores));
}

}  // namespace ddpkit
