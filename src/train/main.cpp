#include <ddpkit/train/main.h>

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <new>
#include <string_view>
#include <system_error>
#include <thread>

#include <fmt/format.h>

#include <ddpkit/comm/environment.h>
#include <ddpkit/process_start.h>
#include <ddpkit/train/launch.h>
#include <ddpkit/train/text.h>

namespace ddpkit::train {
namespace {

constexpr int kFailed = 1;
constexpr int kWrongUsage = 2;
constexpr std::chrono::milliseconds kTimeToSpeak{500};
constexpr std::chrono::milliseconds kTimeToStartAndSpeak{3000};
constexpr std::chrono::milliseconds kStoreLimit{1000};

// Torch appends a stack trace to messages, for some exceptions even to what_without_backtrace().
std::string_view without_backtrace(std::string_view text) {
  return text.substr(0, text.find("\nException raised from"));
}

std::string on_one_line(std::string_view text) {
  std::string line;
  for (const char c : text) {
    if (c != '\n' && c != '\r' && c != '\t') {
      line += c;
    } else if (!line.empty() && line.back() != ' ') {
      line += ' ';
    }
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

// Before the rendezvous, all ranks report the same option errors: only one rank per host prints them.
bool speaks_for_host() {
  try {
    return read_launch_environment().local_rank == 0;
  } catch (const std::exception&) {
    return true;
  }
}

// Prefix of the error that abort() sends to the other ranks. They must not print it again.
constexpr std::string_view kReported = "it reports: ";

// Returns true for the first rank of the job that asks. `without_store`: the result if the store has ended with its
// rank.
bool is_first_to_report(const ProcessGroup& group, bool without_store) {
  if (!group.store()) return true;
  auto answered = std::make_shared<std::promise<bool>>();
  std::future<bool> answer = answered->get_future();
  const auto ask = [answered, without_store, store = group.store()] {
    try {
      answered->set_value(store->add("ddpkit/train/reported", 1) == 1);
    } catch (const std::exception&) {
      answered->set_value(without_store);
    }
  };
  // Runs in a detached thread: without a network the store blocks until the TCP timeout.
  try {
    std::thread(ask).detach();
  } catch (const std::system_error&) {
    ask();  // No memory for a thread.
  }
  return answer.wait_for(kStoreLimit) == std::future_status::ready ? answer.get() : true;
}

// Returns whether this rank prints `error`. Sends errors that the other ranks cannot detect to them.
bool is_ours_to_report(const Error* error, const std::string& sentence, const ProcessGroup& group) {
  if (group.world_size() == 1) return true;
  const std::optional<int> culprit = error ? error->context().rank : std::nullopt;
  if (dynamic_cast<const PeerLost*>(error) || dynamic_cast<const Timeout*>(error)) {
    if (sentence.find(kReported) != std::string::npos) return false;
    const int lowest_left = culprit == 0 ? 1 : 0;
    return is_first_to_report(group, group.rank() == lowest_left);
  }
  const bool is_on_all_ranks =
      culprit || dynamic_cast<const CollectiveMismatch*>(error) || dynamic_cast<const ModelMismatch*>(error);
  if (is_on_all_ranks) return culprit.value_or(0) == group.rank();
  // An error of this rank only, or of each rank separately. Without the store, rank 0 has ended, so rank 0 failed
  // first.
  const bool reports = is_first_to_report(group, false);
  group.abort(std::string(kReported) + sentence);
  return reports;
}

// The store may end with its rank from now on. c10d would log this with a useless stack trace.
void silence_c10d() {
  constexpr int kErrorsOnly = 2;
  if (!std::getenv("TORCH_CPP_LOG_LEVEL")) FLAGS_caffe2_log_level = kErrorsOnly;
}

int report(const std::string& program, const std::exception_ptr& exception, const Program& state) {
  silence_c10d();
  const std::string sentence = one_sentence(exception);
  int code = kFailed;
  bool speaks = false;
  bool may_be_alone = !state.group();
  try {
    std::rethrow_exception(exception);
  } catch (const UsageError&) {
    code = kWrongUsage;
    may_be_alone = false;  // All ranks have the same arguments.
    speaks = state.group() ? is_ours_to_report(nullptr, sentence, *state.group()) : speaks_for_host();
  } catch (const RendezvousError&) {
    speaks = true;
  } catch (const Error& error) {
    speaks = state.group() ? is_ours_to_report(&error, sentence, *state.group()) : speaks_for_host();
  } catch (...) {
    speaks = state.group() ? is_ours_to_report(nullptr, sentence, *state.group()) : speaks_for_host();
  }
  std::fflush(stdout);
  if (speaks) {
    log_line(fmt::format("{}: {}", program, sentence));
  } else {
    // A launcher ends all ranks when the first rank exits. This rank waits until the reporting rank has printed. The
    // launcher's signal also ends the sleep.
    std::this_thread::sleep_for(state.group() ? kTimeToSpeak : kTimeToStartAndSpeak);
    // No other rank failed: the launcher would have ended this rank.
    if (may_be_alone) log_line(fmt::format("{}: {}", program, sentence));
  }
  return code;
}

// stdio's buffer may not fit on a full disk, or an earlier write may have failed.
void check_stdout() {
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) throw Error("cannot write to stdout");
}

}  // namespace

std::string one_sentence(const std::exception_ptr& error) {
  std::string text;
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& torch_error) {
    text = on_one_line(without_backtrace(torch_error.what_without_backtrace()));
  } catch (const std::bad_alloc&) {
    text = "out of memory";
  } catch (const std::exception& other) {
    text = on_one_line(without_backtrace(other.what()));
  } catch (...) {
    text = "an exception that is no std::exception";
  }
  return text.empty() ? "an error without a message" : text;
}

ProcessGroup Program::init_process_group(const InitOptions& options) {
  group_ = ddpkit::init_process_group(options);
  return *group_;
}

int run_main(Options& options, int argc, const char* const* argv, const std::function<void(Program&)>& body,
             const SelfLaunchOptions* launch) noexcept {
  prepare_process();
  Program program;
  try {
    const std::string help = options.parse(argc, argv);
    std::optional<int> exit_code;
    if (!help.empty()) {
      if (speaks_for_host()) std::fputs(help.c_str(), stdout);
    } else {
      if (launch) exit_code = launch_ranks(*launch, options.program(), argc, argv);
      if (!exit_code) body(program);
    }
    check_stdout();
    return exit_code.value_or(0);
  } catch (...) {
    return report(options.program(), std::current_exception(), program);
  }
}

}  // namespace ddpkit::train
