// One rank of DistributedDataParallel or FullyShardedDataParallel. Trains a case on the weights and batches that
// ddp_training.py has written, and saves its weights and losses for comparison: ddp_training CASE FOLDER LEARNING_RATE
// MOMENTUM
#include "ddp_training.h"

#include <fstream>
#include <iostream>
#include <iterator>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/optim/fused_sgd.h>
#include <ddpkit/optim/sharded_optimizer.h>

namespace ddpkit::testing {

std::map<std::string, PeerCase>& peer_cases() {
  static std::map<std::string, PeerCase> cases;
  return cases;
}

namespace {

using Tensors = std::map<std::string, torch::Tensor>;

Tensors read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  if (bytes.empty()) throw InvalidArgument("cannot read " + path);
  Tensors tensors;
  for (const auto& entry : torch::pickle_load(bytes).toGenericDict())
    tensors.emplace(entry.key().toStringRef(), entry.value().toTensor());
  return tensors;
}

void write(const std::string& path, const Tensors& tensors) {
  c10::Dict<std::string, torch::Tensor> dict;
  for (const auto& [name, tensor] : tensors) dict.insert(name, tensor);
  const std::vector<char> bytes = torch::pickle_save(dict);
  std::ofstream file(path, std::ios::binary);
  if (!file.write(bytes.data(), static_cast<std::streamsize>(bytes.size())).flush())
    throw Error("cannot write " + path);
}

/// Returns parameters and buffers by name, as Python's state_dict().
Tensors state_of(const torch::nn::Module& module) {
  Tensors state;
  for (const auto& item : module.named_parameters()) state.emplace(item.key(), item.value().detach());
  for (const auto& item : module.named_buffers()) state.emplace(item.key(), item.value().detach());
  return state;
}

void load(const torch::nn::Module& module, const Tensors& weights) {
  const Tensors state = state_of(module);
  for (const auto& [name, tensor] : weights) {
    if (!state.contains(name)) throw InvalidArgument("the model has no " + name);
  }
  for (const auto& [name, tensor] : state) {
    if (!weights.contains(name)) throw InvalidArgument("Python's model has no " + name);
    if (tensor.sizes() != weights.at(name).sizes()) throw InvalidArgument("Python has another shape of " + name);
    tensor.copy_(weights.at(name));
  }
}

void train(const std::string& name, const std::string& folder, double learning_rate, double momentum) {
  torch::set_num_threads(1);
  const ProcessGroup group = init_process_group({.device = torch::Device(torch::kCPU)});
  if (!peer_cases().contains(name)) throw InvalidArgument("there is no such case");
  const PeerCase& peer_case = peer_cases().at(name);
  const std::shared_ptr<PeerModel> model = peer_case.make(group);
  load(*model, read(folder + "/weights.pt"));
  const Tensors data = read(folder + "/data.pt");
  const auto options = torch::optim::SGDOptions(learning_rate).momentum(momentum);
  // [step, sample, ...]; each rank takes its part.
  const torch::Tensor x = data.at("x").chunk(group.world_size(), 1).at(static_cast<std::size_t>(group.rank()));
  const torch::Tensor y = data.at("y").chunk(group.world_size(), 1).at(static_cast<std::size_t>(group.rank()));
  const torch::Tensor losses = torch::zeros({x.size(0)}, torch::kDouble);
  const auto run = [&](auto& wrapped, auto& optimizer) {
    for (int step = 0; step < x.size(0); ++step) {
      model->begin_step(step, group.rank());
      optimizer.zero_grad();
      const torch::Tensor loss = torch::cross_entropy_loss(wrapped(x[step]), y[step].flatten());
      loss.backward();
      optimizer.step();
      losses[step] = loss.detach();
    }
  };
  const auto save = [&](const std::string& what, const Tensors& tensors) {
    write(fmt::format("{}/{}-{}-of-{}.pt", folder, what, group.rank(), group.world_size()), tensors);
  };
  if (peer_case.fully_sharded) {
    FullyShardedDataParallel fsdp(model, group, *peer_case.fully_sharded);
    optim::ShardedOptimizer<optim::FusedSGD> optimizer(fsdp, options);
    run(fsdp, optimizer);
    const auto whole = fsdp.whole();
    save("rank", state_of(*model));
  } else {
    DistributedDataParallel ddp(model, group, peer_case.options);
    if (peer_case.hook) ddp.register_comm_hook(peer_case.hook(group));
    torch::optim::SGD optimizer(model->parameters(), options);
    run(ddp, optimizer);
    save("rank", state_of(*model));
  }
  save("losses", {{"losses", losses}});
  group.barrier();  // A rank that exits early looks like a dead rank.
}

}  // namespace
}  // namespace ddpkit::testing

int main(int argc, char** argv) {
  if (argc != 5) return std::cerr << "ddp_training CASE FOLDER LEARNING_RATE MOMENTUM\n", 2;
  try {
    ddpkit::testing::train(argv[1], argv[2], std::stod(argv[3]), std::stod(argv[4]));
  } catch (const std::exception& error) {
    std::cerr << argv[1] << ": " << error.what() << '\n';
    return 1;
  }
}
