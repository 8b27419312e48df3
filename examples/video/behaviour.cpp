#include "video/behaviour.h"

namespace video {
namespace {

constexpr double kPi = std::numbers::pi;

double radians_a_frame(double period_frames) { return 2 * kPi / period_frames; }

}  // namespace

Motion::Motion(Behaviour behaviour, int frames, ddpkit::train::Random& random) {
  x_ = random.uniform(-0.06, 0.06);
  y_ = random.uniform(-0.06, 0.06);
  heading_ = random.angle();
  for (Swing* swing : {&along_, &stretch_, &head_, &front_, &hind_, &breath_}) swing->phase = random.angle();
  breath_.speed = radians_a_frame(random.uniform(10, 14));  // Equal in all classes.
  const double sign = random.below(2) == 0 ? 1 : -1;
  switch (behaviour) {
    case Behaviour::kRest:
      break;
    case Behaviour::kWalk:
      along_.speed = radians_a_frame(random.uniform(20, 30));
      break;
    case Behaviour::kSniff:
      head_.speed = radians_a_frame(random.uniform(4, 6));
      break;
    case Behaviour::kGroom:
      front_.speed = radians_a_frame(random.uniform(4, 6));
      break;
    case Behaviour::kRear:
      stretch_.speed = radians_a_frame(random.uniform(14, 20));
      break;
    case Behaviour::kTurn:
      turning_ = sign * random.uniform(0.12, 0.2);
      break;
    case Behaviour::kScratch:
      hind_.speed = radians_a_frame(random.uniform(3.2, 4.5));
      break;
    case Behaviour::kPawWithdraw:
      jerk_frame_ = frames * random.uniform(0.35, 0.65);
      jerk_phase_ = sign * kPi * random.uniform(0.8, 1.2);
      break;
  }
}

Pose Motion::at(double frame) const {
  Pose pose;
  pose.heading = heading_ + turning_ * frame;
  const double along = 0.1 * along_.at(frame);
  pose.x = x_ + along * std::cos(pose.heading);
  pose.y = y_ + along * std::sin(pose.heading);
  pose.stretch = 1 + 0.22 * stretch_.at(frame) + 0.015 * breath_.at(frame);
  pose.head = 0.6 * head_.at(frame);
  pose.front_paws = front_.at(frame);
  const double hind_phase = hind_.phase + hind_.speed * frame + (frame >= jerk_frame_ ? jerk_phase_ : 0);
  pose.hind_paw = std::sin(hind_phase);
  return pose;
}

Pose between(const Pose& from, const Pose& to, double share) {
  const auto mix = [share](double a, double b) { return a + (b - a) * share; };
  return {.x = mix(from.x, to.x),
          .y = mix(from.y, to.y),
          .heading = from.heading + std::remainder(to.heading - from.heading, 2 * kPi) * share,
          .stretch = mix(from.stretch, to.stretch),
          .head = mix(from.head, to.head),
          .front_paws = mix(from.front_paws, to.front_paws),
          .hind_paw = mix(from.hind_paw, to.hind_paw)};
}

}  // namespace video
