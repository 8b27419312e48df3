// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <vector>

#include <ddpkit/train/random.h>

#include "video/behaviour.h"
#include "video/video_reader.h"

namespace video {

/// A cage seen from above with a mouse. Light, bedding and coat are drawn once for each video.
class Scene {
 public:
  Scene(FrameSize size, ddpkit::train::Random& random);

  /// Renders one frame in grey to `pixels` [height, width], with camera noise.
  void render(const Pose& pose, ddpkit::train::Random& random, std::uint8_t* pixels);

 private:
  struct Spot {
    double x, y;           // From the centre of the mouse, x along its body.
    double along, across;  // Radii.
    double angle;          // Relative to the body.
    double grey;
  };
  void draw(const Spot& spot, const Pose& pose);

  FrameSize size_;
  double scale_;       // Pixels of the smaller side.
  double coat_, paw_;  // Grey.
  double length_;      // Of this mouse.
  std::vector<float> background_;
  std::vector<float> canvas_;
};

}  // namespace video
