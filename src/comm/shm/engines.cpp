// Apart from engine.cpp, because the simulated schedules have several processes in one (tests/schedules/world.cpp).
#include "comm/shm/engine.h"

namespace ddpkit::shm {

Engines& Engines::all() {
  static auto* engines = new Engines;  // Never destroyed: groups may be destroyed until the program ends.
  return *engines;
}

}  // namespace ddpkit::shm
