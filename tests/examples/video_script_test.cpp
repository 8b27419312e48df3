// examples/video/train_multigpu.sh
#include <memory>

#include "support/port.h"
#include "video_program.h"

using namespace video::testing;

namespace {

struct Output {
  int exit_code = -1;
  std::string text;
};

Output run_script(const Arguments& arguments, const std::string& port) {
  Arguments command = {
      "sh", "-c",
      "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR; MASTER_PORT=" + port + " exec \"$@\" 2>&1", "sh",
      DDPKIT_TEST_VIDEO_FOLDER "/train_multigpu.sh"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  Output output;
  const auto result = ddpkit::launch({.command = command,
                                      .ranks = 1,
                                      .environment = {{"OMP_NUM_THREADS", "1"}, {"VIDEO", DDPKIT_TEST_VIDEO}},
                                      .time_limit = std::chrono::seconds(100),
                                      .on_output = [&](int, const std::string& text) { output.text += text; }});
  output.exit_code = result.exit_code();
  return output;
}

}  // namespace

TEST_CASE("train_multigpu.sh trains, and uses another port if its port is in use", "[video]") {
  auto listener = std::make_unique<ddpkit::testing::TakenPort>();
  const std::string port = std::to_string(listener->port());

  const std::string line = std::string(42, '=') + "\n";
  Arguments arguments = joined({"2"}, joined(quick(), {"--epochs", "1"}));
  const Output taken = run_script(arguments, port);
  listener.reset();
  INFO(taken.text);
  CHECK(taken.exit_code == 0);
  CHECK_THAT(taken.text, ContainsSubstring("Port " + port + " is taken: using ") &&
                             ContainsSubstring("Multi-GPU Training Launcher\n" + line +
                                               "Number of ranks: 2 (CPU)\nLaunching distributed "
                                               "training...\n") &&
                             ContainsSubstring("\"world_size\":2") && ContainsSubstring("best macro F1"));
}

TEST_CASE("train_multigpu.sh rejects invalid arguments", "[video]") {
  CHECK_THAT(run_script({}, "29500").text, ContainsSubstring("how many GPUs?"));
  CHECK_THAT(run_script({"two"}, "29500").text, ContainsSubstring("'two' is not a number of GPUs"));
  CHECK_THAT(run_script({"0"}, "29500").text, ContainsSubstring("'0' is not a number"));
  CHECK_THAT(run_script({"1"}, "99999").text, ContainsSubstring("MASTER_PORT '99999' is no port"));
  CHECK(run_script({"two"}, "29500").exit_code == 2);
}
