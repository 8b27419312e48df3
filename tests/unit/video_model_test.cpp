#include <torch/torch.h>

#include "support/catch.h"
#include "video/augment.h"
#include "video/best.h"
#include "video/model.h"

using namespace video;

TEST_CASE("the 3D-CNN has 3 M parameters and takes clips of any size", "[video]") {
  torch::manual_seed(0);
  Classifier model({.classes = 8});
  std::int64_t parameters = 0;
  for (const at::Tensor& parameter : model.parameters()) parameters += parameter.numel();
  CHECK(parameters > 2'850'000);
  CHECK(parameters < 3'150'000);
  model.eval();
  const torch::NoGradGuard no_grad;
  for (const auto& [frames, height, width] :
       {std::tuple{17, 64, 64}, std::tuple{17, 48, 80}, std::tuple{1, 16, 16}, std::tuple{9, 33, 21}})
    CHECK(model.forward(torch::randn({2, kClipChannels, frames, height, width})).sizes() == at::IntArrayRef({2, 8}));
}

TEST_CASE("prepared clips hold brightness and its change", "[video]") {
  const at::Tensor pixels = torch::randint(0, 256, {2, 4, 6, 5}, torch::kByte);
  const at::Tensor clips = prepare_clips(pixels, {});
  REQUIRE(clips.sizes() == at::IntArrayRef({2, 2, 4, 6, 5}));
  const at::Tensor grey = pixels.to(torch::kFloat) / 127.5 - 1;
  CHECK(at::allclose(clips.select(1, 0), grey, 0, 1e-6));
  CHECK(clips.select(1, 1).select(1, 0).abs().max().item<float>() == 0);
  CHECK(at::allclose(clips.select(1, 1).narrow(1, 1, 3), 4 * (grey.narrow(1, 1, 3) - grey.narrow(1, 0, 3)), 0, 1e-5));
  // A repeated frame has no change.
  const at::Tensor still = pixels.narrow(1, 1, 1).expand_as(pixels).contiguous();
  CHECK(prepare_clips(still, {}).select(1, 1).abs().max().item<float>() == 0);
}

TEST_CASE("augmentation mirrors, shifts and brightens each clip separately", "[video]") {
  const at::Tensor pixels = torch::randint(0, 256, {3, 2, 10, 20}, torch::kByte);
  const at::Tensor clips = prepare_clips(
      pixels, {{}, {.mirror_x = true, .shift_x = 0.1}, {.mirror_y = true, .shift_y = -0.2, .gain = 2, .offset = 0.25}});
  const at::Tensor grey = (pixels.to(torch::kFloat) / 127.5 - 1);
  CHECK(at::allclose(clips[0][0], grey[0], 0, 1e-6));
  for (int row = 0; row < 10; ++row) {
    for (int column = 0; column < 20; ++column) {
      CAPTURE(row, column);
      const int from_column = 19 - std::clamp(column + 2, 0, 19), from_row = 9 - std::clamp(row - 2, 0, 9);
      CHECK(clips[1][0][1][row][column].item<float>() ==
            Approx(grey[1][1][row][from_column].item<float>()).margin(1e-6));
      CHECK(clips[2][0][1][row][column].item<float>() ==
            Approx(2 * grey[2][1][from_row][column].item<float>() + 0.5).margin(1e-5));
    }
  }
  const Augmentation a = draw_augmentation(1), b = draw_augmentation(1), c = draw_augmentation(2);
  CHECK(a.shift_x == b.shift_x);
  CHECK(a.shift_x != c.shift_x);
}

TEST_CASE("the best epoch is the one of highest macro F1, and survives a checkpoint", "[video]") {
  const auto result = [](std::int64_t right) {
    return ddpkit::train::ClassificationResult{.loss = 0.5,
                                               .accuracy = 0.1 * static_cast<double>(right),
                                               .samples = 20,
                                               .confusion = {{right, 10 - right}, {0, 10}}};
  };
  Best best;
  CHECK(best.update(1, result(0)));
  CHECK(best.update(2, result(6)));
  CHECK_FALSE(best.update(3, result(6)));
  CHECK_FALSE(best.update(4, result(5)));
  torch::serialize::OutputArchive saved;
  best.save(saved);
  std::stringstream stream;
  saved.save_to(stream);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  Best loaded;
  loaded.load(archive);
  CHECK(loaded.epoch() == 2);
  CHECK(loaded.result().macro_f1() == best.result().macro_f1());
  CHECK(loaded.result().samples == 20);
  CHECK_FALSE(loaded.update(5, result(6)));
  CHECK(loaded.update(6, result(7)));
}
