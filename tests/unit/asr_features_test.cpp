#include <torch/torch.h>

#include <cmath>

#include "asr/features.h"
#include "support/catch.h"
#include "support/sound.h"

using asr::LogMel;

TEST_CASE("a tone is in the mel band of its frequency, in every frame", "[asr]") {
  for (const int rate : {8000, 16000}) {
    const LogMel log_mel({.sample_rate = rate, .mels = 40});
    const auto to_mel = [](double hz) { return 2595 * std::log10(1 + hz / 700); };
    for (const double hz : {300.0, 1000.0, 3000.0}) {
      CAPTURE(rate, hz);
      const at::Tensor features = log_mel(tone(hz, 1, rate));
      REQUIRE(features.size(0) == log_mel.frames(rate));
      CHECK(features.size(0) == 98);  // (1000 - 25) ms / 10 ms + 1
      const double band = (to_mel(hz) - to_mel(20)) / (to_mel(rate / 2.0) - to_mel(20)) * 41 - 1;
      const at::Tensor loudest = features.argmax(1);
      CHECK((loudest - band).abs().max().item<double>() <= 1);
    }
  }
}

TEST_CASE("features of short, silent and loud sound are finite", "[asr]") {
  const LogMel log_mel({.sample_rate = 8000, .mels = 40});
  CHECK(log_mel(std::vector<float>(1, 0.5F)).size(0) == 1);
  CHECK(log_mel.frames(1) == 1);
  CHECK(asr::normalised(log_mel(std::vector<float>(8000, 0.0F))).isfinite().all().item<bool>());
  CHECK(asr::normalised(log_mel(tone(440, 1))).isfinite().all().item<bool>());
  CHECK_THROWS_WITH(LogMel({.window_ms = 5, .hop_ms = 10}), ContainsSubstring("leaves sound out"));
  CHECK_THROWS_WITH(LogMel({.sample_rate = 8000, .mels = 400}), ContainsSubstring("too narrow"));
}

TEST_CASE("frames do not depend on where the sound is cut", "[asr]") {
  const LogMel log_mel({.sample_rate = 8000, .mels = 20});
  const std::vector<float> wave = tone(500, 0.5);
  const at::Tensor whole = log_mel(wave);
  const std::vector<float> later(wave.begin() + 800, wave.end());
  CHECK((whole.slice(0, 10) - log_mel(later)).abs().max().item<double>() < 1e-4);
}

TEST_CASE("normalised features have mean 0 and variance 1 in each band", "[asr]") {
  torch::manual_seed(0);
  const at::Tensor features = asr::normalised(torch::randn({200, 7}) * 3 + 5);
  CHECK(features.mean(0).abs().max().item<double>() < 1e-5);
  CHECK((features.var(0, false) - 1).abs().max().item<double>() < 1e-3);
}

TEST_CASE("running normalisation does not look ahead, and comes to what the whole gives", "[asr]") {
  torch::manual_seed(1);
  const at::Tensor sound = torch::randn({5000, 4}) * 2 - 3;
  asr::RunningNormaliser all(torch::zeros({4}), torch::ones({4})), pieces(torch::zeros({4}), torch::ones({4}));
  const at::Tensor at_once = all(sound);
  std::vector<at::Tensor> parts;
  for (std::int64_t begin = 0; begin < 5000; begin += 77) parts.push_back(pieces(sound.slice(0, begin, begin + 77)));
  CHECK((torch::cat(parts) - at_once).abs().max().item<double>() < 1e-5);
  CHECK((at_once.slice(0, 4000) - asr::normalised(sound).slice(0, 4000)).abs().max().item<double>() < 0.3);
}

TEST_CASE("SpecAugment masks within its bounds, the same for the same seed", "[asr]") {
  const at::Tensor features = torch::ones({100, 40});
  const asr::SpecAugmentOptions options{
      .time_masks = 2, .time_width = 30, .time_share = 0.1, .frequency_masks = 1, .frequency_width = 8};
  bool differs = false, masks = false;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const at::Tensor masked = asr::spec_augment(features, options, seed);
    CHECK(masked.equal(asr::spec_augment(features, options, seed)));
    differs = differs || !masked.equal(asr::spec_augment(features, options, seed + 1));
    const auto frames = (masked.sum(1) == 0).sum().item<std::int64_t>();
    const auto bands = (masked.sum(0) == 0).sum().item<std::int64_t>();
    CHECK(frames <= 20);  // 10 % of 100 frames, twice.
    CHECK(bands <= 8);
    masks = masks || (frames > 0 && bands > 0);
  }
  CHECK(differs);
  CHECK(masks);
  CHECK(features.equal(torch::ones({100, 40})));
  // An utterance that is shorter than the masks.
  CHECK(asr::spec_augment(torch::ones({1, 40}), options, 3).size(0) == 1);
}
