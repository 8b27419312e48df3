#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/optim/graphed_step.h>

namespace ddpkit::optim {

class GraphedStep::Impl {};

GraphedStep::GraphedStep(c10::Device device, std::vector<FusedOptimizer*>, Step, const GraphedStepOptions&) {
  throw InvalidArgument(fmt::format(
      "GraphedStep captures CUDA graphs, which there are not on {} in this build of ddpkit: call the step as it is",
      device.str()));
}

GraphedStep::~GraphedStep() = default;
GraphedStep::Tensors GraphedStep::operator()(const Tensors&) { return {}; }
bool GraphedStep::captured() const noexcept { return false; }

}  // namespace ddpkit::optim
