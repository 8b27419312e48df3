// Runs ddpkit's part of state_dicts.py.
//   copy FROM TO                             reads and writes; names ending in .safetensors have that format
//   copy-each FROM TO ...                    the same for each pair; prints a line per pair: "copied" or the error
//   train KIND FROM TO FOLDER START END      reads FROM, trains on FOLDER/data.pt, and writes TO
#include <torch/torch.h>

#include <iostream>
#include <string>

#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_sgd.h>
#include <ddpkit/train/optimizer_state.h>
#include <ddpkit/train/safetensors.h>
#include <ddpkit/train/state_dict.h>

using namespace ddpkit::train;

namespace {

struct Net : torch::nn::Module {
  torch::nn::Sequential layers{
      register_module("layers", torch::nn::Sequential(torch::nn::Linear(20, 32), torch::nn::Tanh(),
                                                      torch::nn::BatchNorm1d(32), torch::nn::Linear(32, 5)))};
};

bool is_safetensors(const std::string& name) { return name.ends_with(".safetensors"); }

void copy(const std::string& from, const std::string& to) {
  const StateValue value = is_safetensors(from) ? StateValue(load_safetensors(from)) : load_state_dict(from);
  is_safetensors(to) ? save_safetensors(to, value.to_dict()) : save_state_dict(to, value);
}

void copy_each(const std::vector<std::string>& names) {
  for (std::size_t i = 0; i + 1 < names.size(); i += 2) {
    try {
      copy(names[i], names[i + 1]);
      std::cout << "copied" << std::endl;
    } catch (const std::exception& error) {
      std::cout << error.what() << std::endl;
    }
  }
}

/// Two groups, with options from the state.
template <class Optimizer, class Options>
std::unique_ptr<torch::optim::Optimizer> make(const Net& net, const Options& options) {
  const auto parameters = net.parameters();
  return std::make_unique<Optimizer>(
      std::vector<torch::optim::OptimizerParamGroup>{
          torch::optim::OptimizerParamGroup({parameters.begin(), parameters.begin() + 2}),
          torch::optim::OptimizerParamGroup({parameters.begin() + 2, parameters.end()})},
      options);
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& kind, const Net& net) {
  if (kind == "adamw") return make<torch::optim::AdamW>(net, torch::optim::AdamWOptions(7));
  if (kind == "adam") return make<torch::optim::Adam>(net, torch::optim::AdamOptions(7));
  if (kind == "sgd") return make<torch::optim::SGD>(net, torch::optim::SGDOptions(7));
  if (kind == "fused_adamw") return make<ddpkit::optim::FusedAdamW>(net, torch::optim::AdamWOptions(7));
  if (kind == "fused_adam") return make<ddpkit::optim::FusedAdam>(net, torch::optim::AdamOptions(7));
  return make<ddpkit::optim::FusedSGD>(net, torch::optim::SGDOptions(7));
}

void train(const std::string& kind, const std::string& from, const std::string& to, const std::string& folder,
           std::int64_t start, std::int64_t end) {
  Net net;
  const auto optimizer = make_optimizer(kind, net);
  const StateValue before = load_state_dict(from), data = load_state_dict(folder + "/data.pt");
  load_module_state(net, before.to_dict().at("model").to_dict());
  load_optimizer_state(*optimizer, before.to_dict().at("optimizer").to_dict());
  for (std::int64_t step = start; step < end; ++step) {
    optimizer->zero_grad();
    const auto output = net.layers->forward(data.to_dict().at("x").to_tensor()[step]);
    torch::cross_entropy_loss(output, data.to_dict().at("y").to_tensor()[step]).backward();
    optimizer->step();
  }
  save_state_dict(to, StateDict{{"model", module_state(net)}, {"optimizer", optimizer_state(*optimizer)}});
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  try {
    if (arguments.at(0) == "copy") {
      copy(arguments.at(1), arguments.at(2));
    } else if (arguments.at(0) == "copy-each") {
      copy_each({arguments.begin() + 1, arguments.end()});
    } else {
      train(arguments.at(1), arguments.at(2), arguments.at(3), arguments.at(4), std::stoll(arguments.at(5)),
            std::stoll(arguments.at(6)));
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
