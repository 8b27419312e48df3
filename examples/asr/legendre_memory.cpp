#include "asr/legendre_memory.h"

#include <ATen/autocast_mode.h>
#include <torch/custom_class.h>
#include <torch/torch.h>

#include <algorithm>
#include <utility>
#include <vector>

#include <ddpkit/optim/precision.h>

namespace asr {
namespace {

constexpr std::int64_t kChunk = 32;      // Steps.
constexpr std::int64_t kMostChunks = 8;  // Chunks per segment. The memories of one segment exist at the same time.
constexpr std::int64_t kRows = 2048;     // Rows per segment, over the batch: about the size of a core's cache.

}  // namespace

LegendreSystem legendre_system(std::int64_t order, double theta) {
  // One exponential computes both: exp([A B; 0 0]) = [a b; 0 1].
  const at::Tensor continuous = torch::zeros({order + 1, order + 1}, torch::kDouble);
  auto value = continuous.accessor<double, 2>();
  for (std::int64_t i = 0; i < order; ++i) {
    const double scale = static_cast<double>(2 * i + 1) / theta;
    for (std::int64_t j = 0; j < order; ++j) value[i][j] = scale * (i < j || (i - j) % 2 == 0 ? -1 : 1);
    value[i][order] = scale * (i % 2 == 0 ? 1 : -1);
  }
  const at::Tensor discrete = torch::matrix_exp(continuous);
  return {.a = discrete.slice(0, 0, order).slice(1, 0, order).contiguous(),
          .b = discrete.slice(0, 0, order).select(1, order).contiguous()};
}

// All float32.
struct LegendreMemory::Matrices {
  std::int64_t order = 0;
  at::Tensor a, b;    // Matrices of the system.
  at::Tensor within;  // [chunk * order, chunk + order]: a chunk's memories from its inputs and previous state.
  at::Tensor end;     // [order, chunk]: computes a chunk's last memory from the inputs alone.
  // [chunks * order, chunks * order]: computes the state before each chunk from the state before the first chunk and
  // the contributions of all but the last chunk. The upper left corner serves fewer chunks.
  at::Tensor carry;

  // Returns the memories of a segment [batch, steps, order * channels], from `u` [batch, whole chunks of steps,
  // channels] and the previous state [batch, order, channels].
  at::Tensor remember(const at::Tensor& u, const at::Tensor& state) const;
  struct Gradients {
    at::Tensor u, state;
  };
  // The backward pass of remember().
  Gradients remember_backward(const at::Tensor& memories) const;
};

namespace {

using Matrices = LegendreMemory::Matrices;

// Multiplies a constant with each matrix of a batch.
at::Tensor times(const at::Tensor& constant, const at::Tensor& batch) {
  return torch::bmm(constant.unsqueeze(0).expand({batch.size(0), constant.size(0), constant.size(1)}), batch);
}

at::Tensor corner(const at::Tensor& matrix, std::int64_t size) { return matrix.slice(0, 0, size).slice(1, 0, size); }

}  // namespace

at::Tensor Matrices::remember(const at::Tensor& u, const at::Tensor& state) const {
  const std::int64_t batch = u.size(0), steps = u.size(1), channels = u.size(2), chunks = steps / kChunk;
  const at::Tensor inputs = u.reshape({batch * chunks, kChunk, channels});
  at::Tensor states = state;
  if (chunks > 1) {
    const at::Tensor ends = times(end, inputs).reshape({batch, chunks, order, channels});
    const at::Tensor added = torch::cat({state.unsqueeze(1), ends.slice(1, 0, chunks - 1)}, 1);
    states = times(corner(carry, chunks * order), added.reshape({batch, chunks * order, channels}));
  }
  const at::Tensor both = torch::cat({inputs, states.reshape({batch * chunks, order, channels})}, 1);
  return times(within, both).reshape({batch, steps, order * channels});
}

Matrices::Gradients Matrices::remember_backward(const at::Tensor& memories) const {
  const std::int64_t batch = memories.size(0), steps = memories.size(1), channels = memories.size(2) / order;
  const std::int64_t chunks = steps / kChunk;
  const at::Tensor both = times(within.t(), memories.reshape({batch * chunks, kChunk * order, channels}));
  at::Tensor inputs = both.slice(1, 0, kChunk);
  const at::Tensor states = both.slice(1, kChunk).reshape({batch, chunks * order, channels});
  if (chunks == 1) return {.u = inputs, .state = states};
  const at::Tensor added = times(corner(carry, chunks * order).t(), states).reshape({batch, chunks, order, channels});
  // A chunk's contribution goes to the next chunk's state; the contribution of the last chunk is unused.
  const at::Tensor ends = torch::cat({added.slice(1, 1), torch::zeros_like(added.slice(1, 0, 1))}, 1);
  inputs = inputs + times(end.t(), ends.reshape({batch * chunks, order, channels}));
  return {.u = inputs.reshape({batch, steps, channels}), .state = added.select(1, 0)};
}

namespace {

// All segments except the last have this length.
std::int64_t segment_steps(std::int64_t batch) {
  return kChunk * std::clamp<std::int64_t>(kRows / (batch * kChunk), 1, kMostChunks);
}

at::Tensor whole_chunks(const at::Tensor& x) {
  const std::int64_t missing = (kChunk - x.size(1) % kChunk) % kChunk;
  return missing == 0 ? x.contiguous() : torch::constant_pad_nd(x, {0, 0, 0, missing});
}

// The tensors that autograd keeps.
struct Held : torch::CustomClassHolder {
  explicit Held(std::shared_ptr<const Matrices> held) : matrices(std::move(held)) {}
  std::shared_ptr<const Matrices> matrices;
};

class Projection : public torch::autograd::Function<Projection> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& u, const at::Tensor& weight,
                            const at::Tensor& bias, const std::shared_ptr<Matrices>& matrices) {
    const c10::DeviceType device = u.device().type();
    const at::ScalarType type =
        at::autocast::is_autocast_enabled(device) ? at::autocast::get_autocast_dtype(device) : weight.scalar_type();
    const ddpkit::optim::Autocast off(u.device(), at::kBFloat16, {.enabled = false});
    const std::int64_t batch = u.size(0), steps = u.size(1);
    const at::Tensor inputs = whole_chunks(u.to(torch::kFloat));
    const at::Tensor reader = weight.to(type).t(), offset = bias.to(type);
    const at::Tensor output = torch::empty({batch, steps, weight.size(0)}, weight.options().dtype(type));
    at::Tensor state = torch::zeros({batch, matrices->order, u.size(2)}, inputs.options());
    std::vector<at::Tensor> states;
    const std::int64_t segment = segment_steps(batch);
    for (std::int64_t begin = 0; begin < steps; begin += segment) {
      states.push_back(state);
      const at::Tensor memories = matrices->remember(inputs.slice(1, begin, begin + segment), state);
      const at::Tensor read = torch::addmm(offset, memories.flatten(0, 1).to(type), reader);
      const at::Tensor place = output.slice(1, begin, begin + segment);
      place.copy_(read.reshape({batch, -1, weight.size(0)}).slice(1, 0, place.size(1)));
      state = memories.select(1, -1).reshape(state.sizes()).clone();
    }
    context->save_for_backward({u, weight, torch::stack(states)});
    context->saved_data["matrices"] = at::IValue::make_capsule(c10::make_intrusive<Held>(matrices));
    context->saved_data["type"] = static_cast<std::int64_t>(type);
    return output;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &u = saved[0], &weight = saved[1], &states = saved[2];
    const auto capsule = context->saved_data["matrices"].toCapsule();
    const auto& matrices = *static_cast<const Held&>(*capsule).matrices;
    const auto type = static_cast<at::ScalarType>(context->saved_data["type"].toInt());
    const ddpkit::optim::Autocast off(u.device(), at::kBFloat16, {.enabled = false});
    const at::Tensor inputs = whole_chunks(u.to(torch::kFloat));
    const at::Tensor errors = whole_chunks(gradients[0].to(type));
    const at::Tensor reader = weight.to(type);
    const std::int64_t batch = u.size(0), segment = segment_steps(batch);
    at::Tensor of_weight, of_state;
    std::vector<at::Tensor> of_u;
    for (std::int64_t number = states.size(0) - 1; number >= 0; --number) {
      const std::int64_t begin = number * segment;
      const at::Tensor memories = matrices.remember(inputs.slice(1, begin, begin + segment), states[number]);
      const at::Tensor error = errors.slice(1, begin, begin + segment).reshape({-1, weight.size(0)});
      const at::Tensor read = memories.flatten(0, 1).to(type);
      if (of_weight.defined() && type == weight.scalar_type())
        of_weight.addmm_(error.t(), read);
      else if (of_weight.defined())
        of_weight += torch::mm(error.t(), read);
      else
        of_weight = torch::mm(error.t(), read).to(weight.scalar_type());
      const at::Tensor of_memories = torch::mm(error, reader).to(torch::kFloat).reshape(memories.sizes());
      if (of_state.defined()) of_memories.select(1, -1).add_(of_state.flatten(1));
      const auto back = matrices.remember_backward(of_memories);
      of_u.insert(of_u.begin(), back.u.reshape({batch, -1, u.size(2)}));
      of_state = back.state;
    }
    const at::Tensor all = of_u.size() == 1 ? of_u.front() : torch::cat(of_u, 1);
    return {all.slice(1, 0, u.size(1)).to(u.scalar_type()), of_weight,
            gradients[0].sum(at::IntArrayRef{0, 1}).to(weight.scalar_type()), at::Tensor()};
  }
};

}  // namespace

LegendreMemory::LegendreMemory(std::int64_t order, double theta)
    : order_(order), matrices_(std::make_shared<Matrices>()) {
  const torch::NoGradGuard no_grad;
  const LegendreSystem system = legendre_system(order, theta);
  std::vector<at::Tensor> impulse, power;  // a^i b and a^(i + 1) for step i of a chunk.
  at::Tensor response = system.b, a = system.a;
  for (std::int64_t i = 0; i < kChunk; ++i) {
    impulse.push_back(response);
    power.push_back(a);
    response = torch::mv(system.a, response);
    a = torch::mm(system.a, a);
  }
  const at::Tensor toeplitz = torch::zeros({kChunk, order, kChunk}, torch::kDouble);  // [step, order, input]
  for (std::int64_t step = 0; step < kChunk; ++step) {
    for (std::int64_t input = 0; input <= step; ++input)
      toeplitz.select(0, step).select(1, input).copy_(impulse[static_cast<std::size_t>(step - input)]);
  }
  const at::Tensor from_state = torch::stack(power).reshape({kChunk * order, order});
  const at::Tensor carry = torch::zeros({kMostChunks, order, kMostChunks, order}, torch::kDouble);
  at::Tensor apart = torch::eye(order, torch::kDouble);
  for (std::int64_t chunks = 0; chunks < kMostChunks; ++chunks) {
    for (std::int64_t to = chunks; to < kMostChunks; ++to) carry.select(0, to).select(1, to - chunks).copy_(apart);
    apart = torch::mm(apart, power.back());
  }
  Matrices& matrices = *matrices_;
  matrices.order = order;
  matrices.a = system.a.to(torch::kFloat);
  matrices.b = system.b.to(torch::kFloat);
  matrices.within = torch::cat({toeplitz.reshape({kChunk * order, kChunk}), from_state}, 1).to(torch::kFloat);
  matrices.end = toeplitz.select(0, kChunk - 1).to(torch::kFloat).contiguous();
  matrices.carry = carry.reshape({kMostChunks * order, kMostChunks * order}).to(torch::kFloat);
}

const std::shared_ptr<LegendreMemory::Matrices>& LegendreMemory::on(c10::Device device) {
  if (matrices_->a.device() != device) {
    auto moved = std::make_shared<Matrices>(*matrices_);
    for (at::Tensor* tensor : {&moved->a, &moved->b, &moved->within, &moved->end, &moved->carry})
      *tensor = tensor->to(device);
    matrices_ = std::move(moved);
  }
  return matrices_;
}

at::Tensor LegendreMemory::project(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& bias) {
  return Projection::apply(u, weight, bias, on(u.device()));
}

at::Tensor LegendreMemory::step(const at::Tensor& u, const at::Tensor& state) {
  const Matrices& matrices = *on(u.device());
  return torch::matmul(matrices.a, state) + matrices.b.unsqueeze(1) * u.unsqueeze(1);
}

}  // namespace asr
