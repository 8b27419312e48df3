// Tests of --multi-gpu and its options.
#include "har_program.h"

using namespace har::testing;

TEST_CASE("har learns on one device, on replicas and on ranks", "[har]") {
  for (const Arguments& way : {Arguments{"--multi-gpu", "none"}, Arguments{"--multi-gpu", "dp", "--replicas", "2"},
                               Arguments{"--multi-gpu", "dp", "--replicas", "3"}, Arguments{"--multi-gpu", "ddp"}}) {
    CAPTURE(way);
    const Run run = run_har(1, joined({"--data", generated(), "--epochs", "12", "--json", "--no-amp"}, way));
    INFO(run.errors);
    REQUIRE(run.exit_code == 0);
    CHECK(run.accuracy() >= 95);
    const auto line = nlohmann::json::parse(run.lines.front());
    const int devices = way.size() == 4 ? std::stoi(way.back()) : 1;
    CHECK(line["devices"] == devices);
    CHECK(line["step"] == (120 + 16 * devices - 1) / (16 * devices));
  }
}

TEST_CASE("replicas, ranks, accumulation and loader threads give one device's weights", "[har]") {
  // No batch norm and no dropout, 120 windows: 5 updates of 24 per epoch, with the same 24 windows in each mode.
  const Arguments common = {"--data", generated(), "--mode", "flatten",  "--dropout",
                            "0",      "--epochs",  "2",      "--no-amp", "--save-dir"};
  const auto weights = [&](int ranks, const Arguments& way) {
    CAPTURE(way);
    const Folder folder;
    const Run run = run_har(ranks, joined(joined(common, {folder.path()}), way));
    INFO(run.errors);
    REQUIRE(run.exit_code == 0);
    CHECK(ddpkit::train::read_checkpoint_info(folder / "checkpoint.pt").step == 10);
    return weights_of(folder, {.mode = har::Mode::kFlatten, .channels = 9, .steps = 64, .classes = 6});
  };
  const auto expected = weights(1, {"--multi-gpu", "none", "--batch-size", "24"});
  const auto check = [&](const std::vector<at::Tensor>& found) {
    for (std::size_t i = 0; i < expected.size(); ++i) CHECK(at::allclose(found[i], expected[i], 1e-4, 2e-5));
  };
  check(weights(1, {"--multi-gpu", "dp", "--replicas", "2", "--batch-size", "12"}));
  check(weights(2, {"--batch-size", "12"}));
  check(weights(3, {"--batch-size", "8"}));
  check(weights(1, {"--batch-size", "8", "--grad-accum-steps", "3"}));
  check(weights(2, {"--batch-size", "4", "--grad-accum-steps", "3"}));
  check(weights(1, {"--multi-gpu", "dp", "--replicas", "2", "--batch-size", "4", "--grad-accum-steps", "3"}));
  CHECK(same_bits(weights(1, {"--batch-size", "24", "--num-workers", "3"}), expected));
  CHECK_FALSE(same_bits(weights(1, {"--batch-size", "24", "--seed", "1"}), expected));
}

TEST_CASE("accumulation counts each sample alike, also in an epoch's last update", "[har]") {
  // 120 windows in batches of 7: the last batch has one window, the last of six updates two batches.
  const auto losses = [&](const Arguments& way) {
    const Run run = run_har(
        1, joined({"--data", generated(), "--mode", "flatten", "--dropout", "0", "--epochs", "1", "--no-amp", "--json"},
                  way));
    INFO(run.errors);
    REQUIRE(run.exit_code == 0);
    return nlohmann::json::parse(run.lines.front());
  };
  const auto parts = losses({"--batch-size", "7", "--grad-accum-steps", "3"});
  const auto whole = losses({"--batch-size", "21"});
  CHECK(parts["step"] == 6);
  CHECK(whole["step"] == 6);
  CHECK(parts["test_loss"].get<double>() == Approx(whole["test_loss"].get<double>()).epsilon(1e-4));
  CHECK(parts["train_loss"].get<double>() == Approx(whole["train_loss"].get<double>()).epsilon(1e-4));
}

TEST_CASE("the learning rate follows devices and warm-up", "[har]") {
  const auto rates = [&](int ranks, const Arguments& way) {
    const Run run = run_har(ranks, joined({"--data", generated(), "--epochs", "3", "--json", "--lr", "0.001",
                                           "--lr-schedule", "constant", "--mode", "flatten"},
                                          way));
    INFO(run.errors);
    REQUIRE(run.exit_code == 0);
    std::vector<double> found;
    for (int i = 0; i < 3; ++i)
      found.push_back(nlohmann::json::parse(run.lines[static_cast<std::size_t>(i)])["lr"].get<double>());
    return found;
  };
  CHECK(rates(1, {}) == std::vector<double>{1e-3, 1e-3, 1e-3});
  CHECK(rates(2, {"--lr-scaling", "linear"})[0] == Approx(2e-3));
  CHECK(rates(1, {"--multi-gpu", "dp", "--replicas", "2", "--lr-scaling", "sqrt"})[0] == Approx(std::sqrt(2) * 1e-3));
  const auto warm = rates(2, {"--lr-scaling", "linear", "--warmup-epochs", "2"});
  // Four updates per epoch; the log has the rate of the last.
  CHECK(warm[0] == Approx(1.375e-3));
  CHECK(warm[1] == Approx(1.875e-3));
  CHECK(warm[2] == Approx(2e-3));
}

TEST_CASE("devices that do not fit are refused", "[har]") {
  const Arguments data = {"--data", generated()};
  const auto refused = [&](const Arguments& way, const std::string& message, const std::vector<int>& worlds = {1}) {
    check_refused(joined(data, way), 2, message, worlds);
  };
  refused({"--multi-gpu", "dp"}, "--multi-gpu dp is one process, but the launcher started 2", {2});
  refused({"--multi-gpu", "none"}, "--multi-gpu none is one process", {2});
  refused({"--multi-gpu", "all"}, "--multi-gpu must be one of none, dp, ddp, libtorch-dp");
  if (torch::cuda::device_count() == 0) refused({"--multi-gpu", "libtorch-dp"}, "needs a GPU", {1});
  refused({"--replicas", "2"}, "--replicas is of --multi-gpu dp");
  refused({"--multi-gpu", "dp", "--replicas", "0"}, "--replicas", {1});
  refused({"--gpu-ids", "0,x"}, "--gpu-ids");
  refused({"--gpu-ids", "-1"}, "--gpu-ids");
  refused({"--grad-accum-steps", "0"}, "--grad-accum-steps");
  refused({"--lr-scaling", "quadratic"}, "--lr-scaling must be one of none, linear, sqrt");
  refused({"--profile", "--no-save"}, "--profile writes into the run folder, which --no-save disables");
  if (torch::cuda::device_count() == 0)
    refused({"--gpu-ids", "0,9"}, "--gpu-ids 0,9: there is no GPU 0: this host shows none");
  if (torch::cuda::device_count() == 1) {
    refused({"--gpu-ids", "0,9"}, "--gpu-ids 0,9: there is no GPU 9: this host shows one, number 0");
    refused({"--gpu-ids", "0,0"}, "GPU 0 occurs twice");
  }
}
