#include "video/scene.h"

#include <algorithm>

namespace video {
namespace {

constexpr double kZoom = 1.2;  // The mouse is about half as long as the frame is wide.

}  // namespace

Scene::Scene(FrameSize size, ddpkit::train::Random& random)
    : size_(size),
      scale_(std::min(size.width, size.height)),
      coat_(random.uniform(40, 75)),
      paw_(random.uniform(215, 240)),
      length_(random.uniform(0.92, 1.08)),
      background_(static_cast<std::size_t>(size.pixels())),
      canvas_(background_.size()) {
  const double light = random.uniform(115, 150);
  const double slope_x = random.uniform(-18, 18), slope_y = random.uniform(-18, 18);
  struct Wave {
    double x, y, phase;
  };
  std::vector<Wave> bedding;
  for (int i = 0; i < 6; ++i) bedding.push_back({random.uniform(-40, 40), random.uniform(-40, 40), random.angle()});
  for (int row = 0; row < size.height; ++row) {
    for (int column = 0; column < size.width; ++column) {
      const double x = (column + 0.5 - size.width / 2.0) / scale_, y = (row + 0.5 - size.height / 2.0) / scale_;
      double grey = light + slope_x * x + slope_y * y;
      for (const Wave& wave : bedding) grey += 2.5 * std::sin(wave.x * x + wave.y * y + wave.phase);
      background_[static_cast<std::size_t>(row) * static_cast<std::size_t>(size.width) +
                  static_cast<std::size_t>(column)] = static_cast<float>(grey);
    }
  }
}

void Scene::draw(const Spot& spot, const Pose& pose) {
  const double cos = std::cos(pose.heading), sin = std::sin(pose.heading);
  const double x = size_.width / 2.0 + scale_ * (pose.x + kZoom * (spot.x * cos - spot.y * sin));
  const double y = size_.height / 2.0 + scale_ * (pose.y + kZoom * (spot.x * sin + spot.y * cos));
  const double angle = pose.heading + spot.angle, ex = std::cos(angle), ey = std::sin(angle);
  const double along = std::max(scale_ * kZoom * spot.along, 0.6), across = std::max(scale_ * kZoom * spot.across, 0.6);
  const double reach = std::max(along, across) + 1.5;
  const auto clamp = [](double value, int last) { return static_cast<int>(std::clamp(value, 0.0, last + 0.0)); };
  const int left = clamp(x - reach, size_.width), right = clamp(x + reach + 1, size_.width);
  const int top = clamp(y - reach, size_.height), bottom = clamp(y + reach + 1, size_.height);
  for (int row = top; row < bottom; ++row) {
    for (int column = left; column < right; ++column) {
      const double dx = column + 0.5 - x, dy = row + 0.5 - y;
      const double u = (dx * ex + dy * ey) / along, v = (dy * ex - dx * ey) / across;
      // Approximate distance from the edge in pixels, positive outside: the edge is one pixel wide.
      const double cover = std::clamp(0.5 - (std::sqrt(u * u + v * v) - 1) * std::min(along, across), 0.0, 1.0);
      float& pixel = canvas_[static_cast<std::size_t>(row) * static_cast<std::size_t>(size_.width) +
                             static_cast<std::size_t>(column)];
      pixel += static_cast<float>(cover) * (static_cast<float>(spot.grey) - pixel);
    }
  }
}

void Scene::render(const Pose& pose, ddpkit::train::Random& random, std::uint8_t* pixels) {
  canvas_ = background_;
  const double half = 0.15 * pose.stretch * length_, wide = 0.085 / std::sqrt(pose.stretch);
  const double neck = half * 0.85;
  const double nose_x = neck + 0.1 * std::cos(pose.head), nose_y = 0.1 * std::sin(pose.head);
  const double front = 0.05 + 0.05 * pose.front_paws, hind = 0.05 + 0.065 * pose.hind_paw;
  // Tail, paws, body, ears, head: later parts cover earlier parts.
  draw({-half - 0.09, 0.01, 0.11, 0.012, 0.15, coat_ + 45}, pose);
  draw({-half * 0.55, wide + hind, 0.045, 0.026, 0.9, paw_}, pose);
  draw({-half * 0.55, -wide - 0.01, 0.035, 0.024, -0.4, paw_}, pose);
  for (const double side : {1.0, -1.0})
    draw({half * 0.55 + front, side * (wide * 0.75 + 0.5 * front), 0.03, 0.022, side * 0.6, paw_}, pose);
  draw({0, 0, half, wide, 0, coat_}, pose);
  draw({neck + 0.02, 0, 0.075, 0.058, 0.5 * pose.head, coat_ + 6}, pose);
  draw({nose_x, nose_y, 0.05, 0.034, pose.head, coat_ + 12}, pose);
  draw({nose_x + 0.045 * std::cos(pose.head), nose_y + 0.045 * std::sin(pose.head), 0.014, 0.014, 0, paw_}, pose);
  for (const double side : {1.0, -1.0}) draw({neck, side * 0.055, 0.028, 0.024, 0, coat_ + 60}, pose);
  // Noise of +-2.5 grey levels, four pixels per draw.
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < canvas_.size(); ++i) {
    if (i % 4 == 0) bits = random.bits();
    const float noise = static_cast<float>(bits & 0xFFFF) * (5.0F / 65536.0F) - 2.5F;
    bits >>= 16;
    pixels[i] = static_cast<std::uint8_t>(std::clamp(canvas_[i] + noise + 0.5F, 0.0F, 255.0F));
  }
}

}  // namespace video
