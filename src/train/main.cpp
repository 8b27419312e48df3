#include <ddpkit/train/main.h>

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <regex>
#include <string_view>
#include <system_error>
#include <thread>

#include <fmt/format.h>

#include <ddpkit/comm/environment.h>
#include <ddpkit/process_start.h>
#include <ddpkit/train/checkpoint.h>
#include <ddpkit/train/launch.h>
#include <ddpkit/train/run_folder.h>
#include <ddpkit/train/run_options.h>
#include <ddpkit/train/text.h>

namespace ddpkit::train {
namespace {

constexpr int kFailed = 1;
constexpr int kWrongUsage = 2;
constexpr int kKilled = 128;  ///< Plus the number of the signal.
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

// Returns "cuda:2 is out of memory (4.25 GiB wanted, 1.10 GiB free)" for LibTorch's message, which has many sentences.
std::string out_of_memory(const std::string& message) {
  static const std::regex kWanted("[Tt]ried to allocate ([0-9.]+ [A-Za-z]+)"), kGpu("GPU ([0-9]+) has"),
      kFree("of which ([0-9.]+ [A-Za-z]+) is free");
  std::smatch gpu, wanted, free;
  if (!std::regex_search(message, wanted, kWanted)) return "out of memory";
  std::string text =
      std::regex_search(message, gpu, kGpu) ? fmt::format("cuda:{} is out of memory", gpu.str(1)) : "out of memory";
  text += fmt::format(" ({} wanted", wanted.str(1));
  if (std::regex_search(message, free, kFree)) text += fmt::format(", {} free", free.str(1));
  return text + ")";
}

bool is_out_of_memory(const c10::Error& error) {
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) ||
         std::string_view(error.what_without_backtrace()).find("DefaultCPUAllocator") != std::string_view::npos;
}

// For an error of memory, returns the options that reduce it: ": reduce --batch-size (2048) or raise
// --grad-accum-steps".
std::string memory_advice(const std::exception_ptr& error, const Options& options) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& torch_error) {
    if (!is_out_of_memory(torch_error)) return {};
  } catch (const std::bad_alloc&) {
  } catch (...) {
    return {};
  }
  try {
    const nlohmann::json values = nlohmann::json::parse(options.resolved());
    // asr has two batch sizes.
    const auto batch = values.find(values.contains("batch_size") ? "batch_size" : "training.batch_size");
    if (batch == values.end()) return {};
    return fmt::format(": reduce --batch-size ({}){}", batch->dump(),
                       values.contains("grad_accum_steps") ? " or raise --grad-accum-steps" : "");
  } catch (const std::bad_alloc&) {
    return {};
  }
}

// If the run folder holds a checkpoint, prints the option that resumes the run. A program that has started its ranks
// does not know the folder that rank 0 has chosen: it is the last one, with a checkpoint since `start`.
void print_resume(const std::string& program, const RunOptions* run, std::filesystem::file_time_type start) {
  if (!run || !run->save) return;
  try {
    const std::filesystem::path folder =
        run->save_dir.empty() ? last_run_folder(program) : std::filesystem::path(run->save_dir);
    const std::filesystem::path checkpoint = folder / "checkpoint.pt";
    if (run->save_dir.empty() && std::filesystem::last_write_time(checkpoint) < start) return;
    const CheckpointInfo info = read_checkpoint_info(checkpoint);
    log_line(fmt::format("{}: resume with --save-dir {} (epoch {}, step {})", program, folder.string(), info.epoch,
                         info.step));
  } catch (const std::exception&) {
    // No checkpoint yet: there is nothing to resume.
  }
}

// The exit code of ranks that Program::join() has started.
struct RanksEnded {
  int exit_code;
};

int report(const Options& options, const std::exception_ptr& exception, const Program& state,
           std::filesystem::file_time_type start) {
  silence_c10d();
  const std::string& program = options.program();
  const std::string sentence = one_sentence(exception) + memory_advice(exception, options);
  int code = kFailed;
  bool speaks = false;
  bool is_resumable = true;
  bool may_be_alone = !state.group();
  // The program that has started the ranks reports a killed rank last.
  const bool is_self_launched = state.run() && !state.run()->launch.nproc_per_node.empty();
  try {
    std::rethrow_exception(exception);
  } catch (const UsageError&) {
    code = kWrongUsage;
    is_resumable = false;
    may_be_alone = false;  // All ranks have the same arguments.
    speaks = state.group() ? is_ours_to_report(nullptr, sentence, *state.group()) : speaks_for_host();
  } catch (const RendezvousError&) {
    speaks = true;
  } catch (const Error& error) {
    // The same command would fail again after an error of the caller.
    is_resumable =
        !dynamic_cast<const InvalidArgument*>(&error) && !(is_self_launched && dynamic_cast<const PeerLost*>(&error));
    speaks = state.group() ? is_ours_to_report(&error, sentence, *state.group()) : speaks_for_host();
  } catch (...) {
    speaks = state.group() ? is_ours_to_report(nullptr, sentence, *state.group()) : speaks_for_host();
  }
  std::fflush(stdout);
  if (speaks) {
    log_line(fmt::format("{}: {}", program, sentence));
    if (is_resumable) print_resume(program, state.run(), start);
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
    if (is_out_of_memory(torch_error)) text = out_of_memory(text);
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

ProcessGroup Program::join(const RunOptions& run, InitOptions options) {
  run_ = &run;
  if (run.elastic && run.backend == "hierarchical")
    throw UsageError(
        "--elastic needs --backend shm, gloo or nccl on one host: hierarchical cannot continue without a lost rank");
  if (const std::optional<int> exit_code = launch_ranks(run, name_, argc_, argv_)) throw RanksEnded{*exit_code};
  options.backend = run.backend;
  options.elastic = run.elastic;
  return init_process_group(options);
}

int run_main(Options& options, int argc, const char* const* argv, const std::function<void(Program&)>& body) noexcept {
  const auto start = std::filesystem::file_time_type::clock::now();
  prepare_process();
  Program program(options.program(), argc, argv);
  try {
    const std::string help = options.parse(argc, argv);
    int exit_code = 0;
    if (!help.empty()) {
      if (speaks_for_host()) std::fputs(help.c_str(), stdout);
    } else {
      try {
        body(program);
      } catch (const RanksEnded& ranks) {
        exit_code = ranks.exit_code;
        if (exit_code > kKilled) print_resume(options.program(), program.run(), start);
      }
    }
    check_stdout();
    return exit_code;
  } catch (...) {
    return report(options, std::current_exception(), program, start);
  }
}

}  // namespace ddpkit::train
