#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <memory>

#include <ddpkit/train/progress.h>

#include "support/catch.h"

using ddpkit::train::ProgressBar;
using std::chrono::milliseconds;

namespace {

// A private terminal: the test reads the text written to stream().
class Terminal {
 public:
  Terminal() {
    control_ = ::posix_openpt(O_RDWR | O_NOCTTY);
    if (control_ < 0 || ::grantpt(control_) != 0 || ::unlockpt(control_) != 0) return;
    stream_ = ::fopen(::ptsname(control_), "w");
    ::fcntl(control_, F_SETFL, O_NONBLOCK);
  }
  ~Terminal() {
    if (stream_) std::fclose(stream_);
    if (control_ >= 0) ::close(control_);
  }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  std::FILE* stream() const { return stream_; }
  std::string written() const {
    std::string text;
    char buffer[4096];
    for (ssize_t n = ::read(control_, buffer, sizeof buffer); n > 0; n = ::read(control_, buffer, sizeof buffer)) {
      text.append(buffer, static_cast<std::size_t>(n));
    }
    return text;
  }

 private:
  int control_ = -1;
  std::FILE* stream_ = nullptr;
};

}  // namespace

TEST_CASE("a terminal sees the bar grow, and a clean line behind it", "[progress]") {
  const Terminal terminal;
  if (!terminal.stream()) DDPKIT_SKIP("this system gives no pseudo-terminal");
  ::setenv("TERM", "xterm", 1);
  ::setenv("LC_ALL", "C", 1);
  {
    ProgressBar bar(4,
                    {.label = "Epoch 1/2", .unit = "clips", .stream = terminal.stream(), .interval = milliseconds(0)});
    bar.advance([] { return std::string("loss=0.5"); });
    bar.advance();
    CHECK_THAT(terminal.written(), ContainsSubstring("Epoch 1/2:  25%|#") && ContainsSubstring("| 1/4 [00:00<00:") &&
                                       ContainsSubstring(" clips/s, loss=0.5]") && ContainsSubstring(" 50%|##"));
    // More steps than announced do not overflow the bar.
    for (int i = 0; i < 10; ++i) bar.advance();
    CHECK_THAT(terminal.written(), ContainsSubstring("100%|##") && ContainsSubstring("4/4"));
  }
  CHECK(terminal.written() == "\r\033[K");
  ::setenv("LC_ALL", "C.UTF-8", 1);
  {
    ProgressBar bar(2, {.later_steps = 4, .stream = terminal.stream(), .interval = milliseconds(0)});
    bar.advance();
    CHECK_THAT(terminal.written(), ContainsSubstring("], run 00:"));
  }
  CHECK(terminal.written() == "\r\033[K");
  ProgressBar bar(3, {.label = "x", .stream = terminal.stream(), .interval = milliseconds(0)});
  bar.advance();
  CHECK_THAT(terminal.written(), ContainsSubstring("x:  33%|█") && ContainsSubstring("| 1/3 ["));
}

TEST_CASE("without a terminal, a heartbeat is a line when it is due", "[progress]") {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::tmpfile(), std::fclose);
  REQUIRE(file);
  const auto written = [&] {
    std::string text(static_cast<std::size_t>(std::ftell(file.get())), '\0');
    std::rewind(file.get());
    text.resize(std::fread(text.data(), 1, text.size(), file.get()));
    return text;
  };
  ProgressBar waits(4,
                    {.label = "x", .heartbeat = true, .stream = file.get(), .first_heartbeat = std::chrono::hours(1)});
  waits.advance();
  CHECK(written().empty());
  ProgressBar bar(4, {.label = "Epoch 1/2",
                      .heartbeat = true,
                      .stream = file.get(),
                      .first_heartbeat = milliseconds(0),
                      .next_heartbeat = std::chrono::hours(1)});
  bar.advance([] { return std::string("loss=0.5"); });
  bar.advance();
  CHECK(written() == "Epoch 1/2:  25% 1/4 [00:00<00:00, loss=0.5]\n");
}

TEST_CASE("a bar that is not due asks for no note", "[progress]") {
  const Terminal terminal;
  if (!terminal.stream()) DDPKIT_SKIP("this system gives no pseudo-terminal");
  ::setenv("TERM", "xterm", 1);
  ProgressBar bar(1000, {.stream = terminal.stream(), .interval = std::chrono::hours(1)});
  int asked = 0;
  for (int i = 0; i < 1000; ++i) bar.advance([&] { return std::to_string(++asked); });
  CHECK(asked == 0);
  CHECK(terminal.written().empty());
}

TEST_CASE("what is no terminal, or not the rank that speaks, sees nothing", "[progress]") {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::tmpfile(), std::fclose);
  REQUIRE(file);
  {
    ProgressBar bar(2, {.label = "x", .stream = file.get(), .interval = milliseconds(0)});
    bar.advance();
  }
  CHECK(std::ftell(file.get()) == 0);
  const Terminal terminal;
  if (!terminal.stream()) DDPKIT_SKIP("this system gives no pseudo-terminal");
  ::setenv("TERM", "xterm", 1);
  {
    ProgressBar bar(2, {.enabled = false, .stream = terminal.stream(), .interval = milliseconds(0)});
    bar.advance();
  }
  ::setenv("TERM", "dumb", 1);
  {
    ProgressBar bar(2, {.stream = terminal.stream(), .interval = milliseconds(0)});
    bar.advance();
  }
  CHECK(terminal.written().empty());
}
