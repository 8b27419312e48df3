#include "model.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/parallel/activation_checkpoint.h>
#include <ddpkit/parallel/sync_batch_norm.h>

#include "support/checkpoint.h"

namespace ddpkit::fuzz {
namespace {

constexpr std::int64_t kRowsOfEmbedding = 5;

/// Uniform in [-0.5, 0.5), always in double, so that a type changes only the rounding.
at::Tensor numbers(std::uint64_t seed, at::IntArrayRef sizes) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed * 0x9E3779B97F4A7C15u + 12345);
  return at::rand(sizes, generator, at::kDouble) - 0.5;
}

bool is_own(const std::string& kind) {
  return kind == "matmul" || kind == "scale" || kind == "empty" || kind == "bias" || kind == "complex";
}

template <class M>
M& cast_to(const std::shared_ptr<torch::nn::Module>& module) {
  return static_cast<M&>(*module);
}

}  // namespace

at::ScalarType type_named(const std::string& name) {
  static const std::map<std::string, at::ScalarType> types{
      {"f64", at::kDouble}, {"f32", at::kFloat}, {"bf16", at::kBFloat16}, {"f16", at::kHalf}};
  return types.at(name);
}

Batch map_tensors(const Batch& batch, const TensorMap& map) {
  return {map(batch.x), map(batch.index), map(batch.mask), map(batch.coefficients), batch.step, batch.rank};
}

Batch make_batch(const Case& drawn, int number, int rank) {
  const std::uint64_t seed = drawn.data * 1'000'003 + static_cast<std::uint64_t>(number * 64 + rank) * 8;
  const at::ScalarType dtype = type_named(drawn.dtype);
  const std::vector<std::int64_t> sizes{drawn.rows, drawn.width};
  return {.x = (2 * numbers(seed, sizes)).to(dtype),
          .index = ((numbers(seed + 1, {drawn.rows}) + 0.5) * kRowsOfEmbedding).to(at::kLong),
          .mask = (numbers(seed + 2, sizes) + 1).to(dtype),
          .coefficients = (0.8 + 0.4 * numbers(seed + 3, sizes)).to(dtype),
          .step = number,
          .rank = rank};
}

at::Tensor loss_of(const Case& drawn, const at::Tensor& output, const Batch& batch) {
  return (output * batch.coefficients).sum(1).mean() * drawn.magnitude;
}

Model::Model(const Case& drawn, int rank, std::optional<ProcessGroup> group, bool is_reference)
    : drawn_(std::make_shared<const Case>(drawn)),
      rank_(rank),
      group_(std::move(group)),
      is_reference_(is_reference),
      input_type_(type_named(drawn.dtype)) {
  reset();
  fill();
  for (std::size_t i = 0; i < drawn.nodes.size(); ++i) {
    const Node& node = drawn.nodes[i];
    if (node.layout_rank < 0 || node.layout_rank == rank) set_layout(i, node.layout);
    if (node.frozen)
      for (const at::Tensor& parameter : parameters_of(i)) parameter.set_requires_grad(false);
  }
  make_flat();
}

void Model::reset() {
  const std::size_t count = drawn_->nodes.size();
  children_of_.assign(count, nullptr);
  own_.assign(count, {});
  const std::int64_t width = drawn_->width;
  for (std::size_t i = 0; i < count; ++i) {
    const Node& node = drawn_->nodes[i];
    const std::string name = fmt::format("n{}", i);
    const at::ScalarType dtype = type_named(node.dtype.empty() ? drawn_->dtype : node.dtype);
    std::shared_ptr<torch::nn::Module>& child = children_of_[i];
    if (is_own(node.kind)) {
      std::vector<std::int64_t> sizes;
      if (node.kind == "matmul") sizes = {width, width};
      if (node.kind == "bias" || node.kind == "complex") sizes = {width};
      if (node.kind == "empty") sizes = {0};
      const at::ScalarType own_type = node.kind != "complex"   ? dtype
                                      : drawn_->dtype == "f32" ? at::kComplexFloat
                                                               : at::kComplexDouble;
      own_[i] = register_parameter(name, at::zeros(sizes, own_type));
      continue;
    }
    if (node.kind == "linear") child = torch::nn::Linear(width, width).ptr();
    if (node.kind == "conv")
      child = torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 2, {3, 2}).padding(torch::ExpandingArray<2>({1, 0}))).ptr();
    if (node.kind == "embedding")
      child = torch::nn::Embedding(
                  torch::nn::EmbeddingOptions(kRowsOfEmbedding, width).sparse(node.sparse && !is_reference_))
                  .ptr();
    if (node.kind == "layer_norm") child = torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})).ptr();
    if (node.kind == "batch_norm" || (node.kind == "sync_batch_norm" && !group_))
      child = torch::nn::BatchNorm1d(width).ptr();
    else if (node.kind == "sync_batch_norm")
      child = SyncBatchNorm(torch::nn::BatchNormOptions(width), group_).ptr();
    if (node.kind == "lstm") child = torch::nn::LSTM(torch::nn::LSTMOptions(width, width)).ptr();
    if (!child) continue;  // A mask has no parameters.
    child->to(dtype);
    register_module(name, child);
    if (node.tie < 0 || node.tie >= static_cast<int>(i) || node.kind != "linear") continue;
    if (drawn_->nodes[static_cast<std::size_t>(node.tie)].kind != "linear") continue;
    auto& linear = cast_to<torch::nn::LinearImpl>(child);
    linear.weight.set_requires_grad(false);
    const at::Tensor& source = cast_to<torch::nn::LinearImpl>(children_of_[static_cast<std::size_t>(node.tie)]).weight;
    linear.weight = node.tie_by == "handle" ? source : register_parameter(name + "_weight", source);
  }
}

void Model::fill() {
  const torch::NoGradGuard no_grad;
  const std::uint64_t start = drawn_->data * 977 + (drawn_->other_starts ? static_cast<std::uint64_t>(rank_) * 131 : 0);
  std::uint64_t number = 0;
  for (const at::Tensor& parameter : parameters()) {
    const at::Tensor values = numbers(start + ++number * 1009, parameter.sizes());
    if (parameter.is_complex())
      parameter.copy_(at::complex(values, numbers(start + ++number * 1009, parameter.sizes())));
    else
      parameter.copy_(1.6 * values);
  }
}

void Model::set_layout(std::size_t index, const std::string& layout) {
  const torch::NoGradGuard no_grad;
  const auto parameters = parameters_of(index);
  if (parameters.empty() || parameters[0].dim() == 0) return;
  at::Tensor parameter = parameters[0];
  const at::Tensor values = parameter.detach().clone(at::MemoryFormat::Contiguous);
  if (layout == "contiguous") parameter.set_data(values);
  if (layout == "transposed" && values.dim() >= 2)
    parameter.set_data(values.transpose(0, 1).contiguous().transpose(0, 1));
  if (layout == "channels_last" && values.dim() == 4)
    parameter.set_data(values.contiguous(at::MemoryFormat::ChannelsLast));
  if (layout == "sliced") {
    auto sizes = values.sizes().vec();
    sizes.back() *= 2;
    parameter.set_data(at::zeros(sizes, values.options()).narrow(-1, 0, values.size(-1)).copy_(values));
  }
}

void Model::make_flat() {
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> members;
  for (std::size_t i = 0; i < drawn_->nodes.size(); ++i) {
    const Node& node = drawn_->nodes[i];
    if (node.layout != "flat" || !node.dtype.empty() || node.kind == "complex") continue;
    for (const at::Tensor& parameter : parameters_of(i)) members.push_back(parameter);
  }
  if (members.empty()) return;
  std::vector<at::Tensor> parts;
  for (const at::Tensor& member : members) parts.push_back(member.detach().flatten());
  flat = at::cat(parts);
  std::int64_t offset = 0;
  for (at::Tensor& member : members) {
    member.set_data(flat.narrow(0, offset, member.numel()).view(member.sizes()));
    offset += member.numel();
  }
}

at::Tensor Model::weight(std::size_t index) const {
  return own_[index].defined() ? own_[index] : cast_to<torch::nn::LinearImpl>(children_of_[index]).weight;
}

std::vector<at::Tensor> Model::parameters_of(std::size_t index) const {
  if (index >= own_.size()) return {};
  if (own_[index].defined()) return {own_[index]};
  if (!children_of_[index]) return {};
  return children_of_[index]->parameters();
}

std::vector<at::Tensor> Model::distinct_parameters() const {
  std::vector<at::Tensor> distinct;
  std::unordered_set<const void*> seen;
  for (const at::Tensor& parameter : parameters()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) distinct.push_back(parameter);
  }
  return distinct;
}

void Model::hold_gradients() {
  held.clear();
  for (const auto& item : named_parameters())
    if (item.value().grad().defined()) held[item.key()] = item.value().grad();
}

std::vector<std::string> Model::ignored_names() const {
  std::vector<std::string> names;
  const auto add = [&](const auto& all) {
    for (const auto& item : all) {
      const std::string& name = item.key();
      const std::size_t node = std::stoul(name.substr(1));
      if (drawn_->nodes[node].ignored) names.push_back(name);
    }
  };
  add(named_parameters());
  add(named_buffers());
  return names;
}

at::Tensor Model::forward(const Batch& batch) {
  at::Tensor x = input(batch);
  auto backward_throws = std::exchange(throws_in_backward_, std::nullopt);
  const auto throw_in_backward = [&](const at::Tensor& of) {
    of.register_hook([](const at::Tensor&) -> void { throw Thrown(); });
    backward_throws.reset();
  };
  // Backward does not continue past a layer that detaches its input.
  const auto reaches = [&](std::size_t i) {
    const auto after = drawn_->nodes.begin() + static_cast<std::ptrdiff_t>(i) + 1;
    return std::none_of(after, drawn_->nodes.end(), [](const Node& node) { return node.detach; });
  };
  for (std::size_t i = 0; i < drawn_->nodes.size(); ++i) {
    x = run(i, x, batch);
    if (backward_throws && *backward_throws <= i && reaches(i) && x.requires_grad()) throw_in_backward(x);
  }
  if (std::exchange(throws_in_forward_, false)) throw Thrown();
  x = output(x);
  if (backward_throws) throw_in_backward(x);
  return x;
}

at::Tensor Model::run(std::size_t index, at::Tensor x, const Batch& batch) {
  const Node& node = drawn_->nodes[index];
  if (node.when == "never" || (node.when == "even_steps" && batch.step % 2 != 0) ||
      (node.when == "rank_0" && batch.rank != 0) || (node.when == "by_rank" && (batch.step + batch.rank) % 2 != 0))
    return x;
  if (node.detach) x = x.detach();
  const bool checkpointed = node.checkpoint && !is_reference_ && torch::GradMode::is_enabled();
  const auto block = [this, index, batch](const at::Tensor& input) { return apply(index, input, batch); };
  for (int use = 0; use < node.uses; ++use) {
    if (node.recomputed && !is_reference_) {
      x = activation_checkpoint(block, x);
      continue;
    }
    if (!checkpointed) {
      x = apply(index, x, batch);
      continue;
    }
    // A checkpoint has a backward only if its input requires a gradient.
    if (!x.requires_grad()) x = x.detach().requires_grad_();
    x = testing::Checkpoint::apply(x, block);
  }
  return x;
}

at::Tensor Model::apply(std::size_t index, const at::Tensor& x, const Batch& batch) {
  const Node& node = drawn_->nodes[index];
  const std::string& kind = node.kind;
  const auto& child = children_of_[index];
  if (kind == "mask") return x * batch.mask.to(x.scalar_type());
  if (kind == "matmul") return torch::tanh(x.matmul(own_[index].to(x.scalar_type())));
  if (kind == "scale") return x * own_[index].to(x.scalar_type());
  if (kind == "bias") return x + own_[index].to(x.scalar_type());
  if (kind == "empty") return x + own_[index].to(x.scalar_type()).sum();
  if (kind == "complex") return (x * own_[index]).abs();
  if (kind == "linear") {
    const auto& linear = cast_to<torch::nn::LinearImpl>(child);
    return torch::tanh(torch::linear(x, weight(index).to(x.scalar_type()), linear.bias.to(x.scalar_type())));
  }
  if (kind == "conv") {
    const at::Tensor plane = x.unsqueeze(1).unsqueeze(3);  // [rows, 1, width, 1]
    const at::Tensor planes = torch::cat({plane, plane * 0.5}, 1);
    const at::Tensor y = cast_to<torch::nn::Conv2dImpl>(child).forward(torch::cat({planes, planes * 2}, 3)).squeeze(3);
    return torch::tanh(y.select(1, 0) + 0.3 * y.select(1, 1));
  }
  if (kind == "embedding") return x + cast_to<torch::nn::EmbeddingImpl>(child).forward(batch.index);
  if (kind == "layer_norm") return cast_to<torch::nn::LayerNormImpl>(child).forward(x);
  if (kind == "lstm") return std::get<0>(cast_to<torch::nn::LSTMImpl>(child).forward(x.unsqueeze(0))).squeeze(0);
  if (kind == "sync_batch_norm" && group_) return cast_to<SyncBatchNormImpl>(child).forward(x);
  if (kind == "batch_norm" || kind == "sync_batch_norm") return cast_to<torch::nn::BatchNorm1dImpl>(child).forward(x);
  throw std::invalid_argument("a case has no node \"" + kind + "\"");
}

}  // namespace ddpkit::fuzz
