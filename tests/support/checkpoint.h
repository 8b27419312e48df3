// Imitates Python's torch.utils.checkpoint with use_reentrant=True.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <utility>

namespace ddpkit::testing {

struct Checkpoint : torch::autograd::Function<Checkpoint> {
  using Block = std::function<at::Tensor(const at::Tensor&)>;
  struct Held : torch::CustomClassHolder {
    explicit Held(Block block) : run(std::move(block)) {}
    Block run;
  };

  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const Block& block) {
    context->save_for_backward({x});
    context->saved_data["block"] = c10::IValue::make_capsule(c10::make_intrusive<Held>(block));
    return block(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto block = c10::static_intrusive_pointer_cast<Held>(context->saved_data["block"].toCapsule());
    const auto x = context->get_saved_variables()[0].detach().requires_grad_();
    const torch::AutoGradMode on(true);
    torch::autograd::backward({block->run(x)}, {gradients[0]});
    return {x.grad(), at::Tensor()};
  }
};

}  // namespace ddpkit::testing
