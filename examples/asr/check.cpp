#include "asr/check.h"

#include <torch/torch.h>
#include <unistd.h>

#include <cmath>
#include <functional>

#include <fmt/format.h>

#include <ddpkit/ddpkit.h>
#include <ddpkit/train/text.h>
#include <ddpkit/train/together.h>

#include "asr/model.h"

namespace asr {
namespace {

using ddpkit::train::print_line;

void expect(bool is_right, const std::string& what) {
  if (!is_right) throw ddpkit::Error(what);
}

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

void check_all_reduce(const ddpkit::ProcessGroup& group) {
  const at::Tensor tensor = torch::full({1 << 16}, group.rank() + 1.0, group.device());
  group.all_reduce(tensor);
  const double ranks = group.world_size();
  const double want = ranks * (ranks + 1) / 2;
  expect((tensor == want).all().item<bool>(),
         fmt::format("all_reduce: the sum of 1 .. {} came out as {}", ranks, tensor[0].item<double>()));
}

void check_broadcast(const ddpkit::ProcessGroup& group) {
  const int last = group.world_size() - 1;
  const at::Tensor tensor = torch::full({1000}, 1.0 * group.rank(), group.device());
  group.broadcast(tensor, last);
  expect((tensor == last).all().item<bool>(), fmt::format("broadcast: rank {}'s value did not arrive", last));
}

void check_all_gather(const ddpkit::ProcessGroup& group) {
  const at::Tensor all = group.all_gather(torch::full({3}, 1.0 * group.rank(), group.device())).reshape({-1, 3});
  for (int rank = 0; rank < group.world_size(); ++rank)
    expect((all[rank] == rank).all().item<bool>(), fmt::format("all_gather: rank {}'s value did not arrive", rank));
}

// Each rank has different utterances. All ranks must get the gradient of the mean over all utterances.
void check_gradients(const ddpkit::ProcessGroup& group) {
  torch::manual_seed(0);
  auto model = std::make_shared<Recognizer>(
      ModelOptions{.mels = 8, .width = 16, .strides = {2}, .layers = 1, .memory_channels = 4, .order = 6, .theta = 10});
  auto alone = std::dynamic_pointer_cast<Recognizer>(model->clone());
  model->to(group.device());
  alone->to(group.device());
  const at::Tensor all = torch::rand({group.world_size(), 2, 20, 8}).to(group.device());  // The same on every rank.
  ddpkit::DistributedDataParallel<Recognizer> ddp(model, group);
  ddp(all[group.rank()]).square().mean().backward();
  alone->forward(all.flatten(0, 1)).square().mean().backward();
  const auto names = alone->named_parameters();
  for (const auto& item : model->named_parameters()) {
    const double apart = (item.value().grad() - names[item.key()].grad()).abs().max().item<double>();
    expect(apart < 1e-5, fmt::format("the gradient of {} differs by {} from one process's", item.key(), apart));
  }
}

}  // namespace

void check(const ddpkit::ProcessGroup& group) {
  const bool speaks = group.rank() == 0;
  for (int rank = 0; rank < group.world_size(); ++rank) {
    const std::string line =
        ddpkit::train::broadcast_bytes(group,
                                       fmt::format("rank {} of {}: process {} on {}, {}", group.rank(),
                                                   group.world_size(), ::getpid(), host_name(), group.device().str()),
                                       rank);
    if (speaks) print_line(line);
  }
  const std::pair<const char*, void (*)(const ddpkit::ProcessGroup&)> tests[] = {
      {"all_reduce", check_all_reduce},
      {"broadcast", check_broadcast},
      {"all_gather", check_all_gather},
      {"barrier", [](const ddpkit::ProcessGroup& all) { all.barrier(); }},
      {"gradients of DistributedDataParallel", check_gradients},
  };
  for (const auto& [name, test] : tests) {
    test(group);
    group.barrier();
    if (speaks) print_line(fmt::format("ok  {}", name));
  }
  if (speaks)
    print_line(fmt::format("the distributed set-up works: {} rank{}, {}", group.world_size(),
                           group.world_size() == 1 ? "" : "s", group.backend_name()));
}

}  // namespace asr
