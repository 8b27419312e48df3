// Tier 0: the standard library only. The behaviour of the synthetic mouse.
#pragma once

#include <array>
#include <cstddef>

#include <ddpkit/train/random.h>

namespace video {

enum class Behaviour { kRest, kWalk, kSniff, kGroom, kRear, kTurn, kScratch, kPawWithdraw };

struct BehaviourClass {
  const char* name;
  double percent;  ///< Of all trials.
};

/// As imbalanced as in a study of a mouse in its cage. [Behaviour]
inline constexpr std::array<BehaviourClass, 8> kBehaviours = {{{"rest", 54},
                                                               {"walk", 14},
                                                               {"sniff", 11},
                                                               {"groom", 8},
                                                               {"rear", 6},
                                                               {"turn", 4},
                                                               {"scratch", 2},
                                                               {"paw_withdraw", 1}}};

/// Position and posture of the mouse in one frame. Lengths are shares of the frame's smaller side.
struct Pose {
  double x = 0, y = 0;  ///< Centre of the body, from the centre of the frame.
  double heading = 0;   ///< Radians.
  double stretch = 1;   ///< The body's length, relative.
  double head = 0;      ///< The head's angle to the body, radians.
  double front_paws = 0;
  double hind_paw = 0;  ///< How far they are extended.
};

/// The pose over one trial.
///
/// Each number of the pose is base + amplitude * sin(phase), with a phase drawn from the whole circle (the heading is
/// the phase itself). A behaviour advances one of the phases. So in a single frame, all poses are equally likely in all
/// classes; only the change between frames distinguishes the classes.
class Motion {
 public:
  Motion(Behaviour behaviour, int frames, ddpkit::train::Random& random);

  Pose at(double frame) const;

 private:
  struct Swing {
    double phase = 0;
    double speed = 0;  ///< Radians per frame.
    double at(double frame) const { return std::sin(phase + speed * frame); }
  };

  double x_ = 0, y_ = 0;
  double heading_ = 0, turning_ = 0;
  Swing along_, stretch_, head_, front_, hind_, breath_;
  double jerk_frame_ = 1e9, jerk_phase_ = 0;  ///< The frame in which the hind paw moves, and the jump of its phase.
};

/// Interpolates between two poses, from the end of a trial to the beginning of the next.
Pose between(const Pose& from, const Pose& to, double share);

}  // namespace video
