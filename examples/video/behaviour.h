// Tier 0: the standard library only. What the made-up mouse does.
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

/// As uneven as in a study of a mouse in its cage. [Behaviour]
inline constexpr std::array<BehaviourClass, 8> kBehaviours = {{{"rest", 54},
                                                               {"walk", 14},
                                                               {"sniff", 11},
                                                               {"groom", 8},
                                                               {"rear", 6},
                                                               {"turn", 4},
                                                               {"scratch", 2},
                                                               {"paw_withdraw", 1}}};

/// Where the mouse is in one frame, and how it holds itself. Lengths are shares of the frame's smaller side.
struct Pose {
  double x = 0, y = 0;  ///< Of the body's middle, from the frame's.
  double heading = 0;   ///< Radians.
  double stretch = 1;   ///< The body's length, relative.
  double head = 0;      ///< The head's angle to the body, radians.
  double front_paws = 0;
  double hind_paw = 0;  ///< How far they are put out.
};

/// The pose over one trial.
///
/// Whatever the behaviour, each of the pose's numbers is of the form base + amplitude * sin(phase), with a phase drawn
/// from the whole circle (the heading is the phase itself). A behaviour lets one of the phases run: so in any single
/// frame all poses are as likely in one class as in another, and only the change from frame to frame tells them apart.
class Motion {
 public:
  Motion(Behaviour behaviour, int frames, ddpkit::train::Random& random);

  Pose at(double frame) const;

 private:
  struct Swing {
    double phase = 0;
    double speed = 0;  ///< Radians a frame.
    double at(double frame) const { return std::sin(phase + speed * frame); }
  };

  double x_ = 0, y_ = 0;
  double heading_ = 0, turning_ = 0;
  Swing along_, stretch_, head_, front_, hind_, breath_;
  double jerk_frame_ = 1e9, jerk_phase_ = 0;  ///< When the hind paw is put elsewhere, and how far its phase jumps.
};

/// Between two poses, as the mouse comes from one trial's end to the next one's beginning.
Pose between(const Pose& from, const Pose& to, double share);

}  // namespace video
