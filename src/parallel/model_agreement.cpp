#include "parallel/model_agreement.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ATen/ATen.h>
#include <c10/util/strides.h>
#include <torch/nn/modules/embedding.h>

#include <ddpkit/error.h>

namespace ddpkit {
namespace {

std::string describe(const char* kind, const std::string& name, const at::Tensor& tensor) {
  return fmt::format("{} {} [{}] {}", kind, name, fmt::join(tensor.sizes(), ", "), c10::toString(tensor.scalar_type()));
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

/// For the current exception `error`: if its exact type is E and it names no rank, returns an E that names `rank` and
/// `call`.
template <class E>
std::exception_ptr with_rank(const E& error, int rank, const char* call) {
  if (typeid(error) != typeid(E) || error.context().rank) return std::current_exception();
  Error::Context context = error.context();
  context.rank = rank;
  if (context.call.empty()) context.call = call;
  return std::make_exception_ptr(E(error.what(), context));
}

/// Collective. Returns rank 0's numbers.
std::vector<std::int64_t> numbers_of_rank_0(const std::vector<std::int64_t>& numbers, const ProcessGroup& group) {
  if (group.world_size() == 1 || numbers.empty()) return numbers;
  const at::Tensor message = at::tensor(numbers, at::kLong).to(group.device());
  group.broadcast(message);
  const at::Tensor agreed = message.cpu();
  group.check();
  const auto* begin = agreed.const_data_ptr<std::int64_t>();
  return {begin, begin + agreed.numel()};
}

}  // namespace

std::optional<RankDifference> first_difference(const std::vector<std::string>& texts) {
  const auto reference = split_lines(texts[0]);
  for (std::size_t r = 1; r < texts.size(); ++r) {
    if (texts[r] == texts[0]) continue;
    const auto other = split_lines(texts[r]);
    const auto [here, there] = std::mismatch(reference.begin(), reference.end(), other.begin(), other.end());
    constexpr const char* kEnd = "nothing more";
    return RankDifference{.rank = static_cast<int>(r),
                          .reference = here == reference.end() ? kEnd : *here,
                          .other = there == other.end() ? kEnd : *there};
  }
  return std::nullopt;
}

void run_on_all_ranks(const ProcessGroup& group, const char* call, const std::function<void()>& body) {
  texts_of_all_ranks(group, call, [&] {
    body();
    return std::string();
  });
}

std::vector<std::string> texts_of_all_ranks(const ProcessGroup& group, const char* call,
                                            const std::function<std::string()>& body) {
  // First byte: '.' for no error, 'i' for an InvalidArgument, 'e' for any other error.
  std::string text;
  std::exception_ptr own;
  const auto fail = [&](char kind, const char* what, std::exception_ptr error = std::current_exception()) {
    text = kind + std::string(what);
    own = std::move(error);
  };
  try {
    text = '.' + body();
  } catch (const PeerLost& error) {
    group.abort(error.what());  // The lost rank may have taken part in the next exchange before it ended.
    throw;
  } catch (const InvalidArgument& error) {
    fail('i', error.what(), with_rank(error, group.rank(), call));
  } catch (const Error& error) {
    fail('e', error.what(), with_rank(error, group.rank(), call));
  } catch (const c10::Error& error) {
    fail('e', error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail('e', error.what());
  } catch (...) {
    fail('e', "an exception that is no std::exception");
  }
  std::vector<std::string> texts{text};
  if (group.world_size() > 1) texts = group.all_gather_bytes(text);
  for (std::size_t r = 0; r < texts.size(); ++r) {
    const char kind = texts[r].front();
    texts[r].erase(0, 1);
    if (kind == '.') continue;
    if (own && static_cast<int>(r) == group.rank()) std::rethrow_exception(own);
    const std::string message = fmt::format("rank {}: {}", r, texts[r]);
    const Error::Context context{.rank = static_cast<int>(r), .call = call};
    if (kind == 'i') throw InvalidArgument(message, context);
    throw Error(message, context);
  }
  return texts;
}

void check_same_on_all_ranks(const ProcessGroup& group, const char* call, const std::function<std::string()>& body) {
  if (const auto found = first_difference(texts_of_all_ranks(group, call, body)))
    throw InvalidArgument(fmt::format("{} differs between rank 0 and rank {}: \"{}\" and \"{}\"", call, found->rank,
                                      found->reference, found->other));
}

std::unordered_set<const void*> sparse_weights(const torch::nn::Module& module) {
  std::unordered_set<const void*> weights;
  module.apply([&](const torch::nn::Module& child) {
    if (const auto* embedding = child.as<torch::nn::Embedding>(); embedding && embedding->options.sparse())
      weights.insert(embedding->weight.unsafeGetTensorImpl());
    if (const auto* bag = child.as<torch::nn::EmbeddingBag>(); bag && bag->options.sparse())
      weights.insert(bag->weight.unsafeGetTensorImpl());
  });
  return weights;
}

std::vector<std::string> describe_model(const torch::nn::Module& module, const NamedTensors& parameters,
                                        const NamedTensors& buffers) {
  std::vector<std::string> lines;
  const auto sparse = sparse_weights(module);
  std::unordered_map<const void*, std::string> first_names;
  for (const auto& [name, tensor] : parameters) {
    const void* identity = tensor.unsafeGetTensorImpl();
    const auto [first, is_new] = first_names.emplace(identity, name);
    std::string& line = lines.emplace_back(describe("parameter", name, tensor));
    if (!tensor.requires_grad()) line += " (requires_grad false)";
    if (sparse.contains(identity)) line += " (sparse gradient)";
    if (!is_new) line += fmt::format(" (the same tensor as {})", first->second);
  }
  for (const auto& [name, tensor] : buffers) lines.push_back(describe("buffer", name, tensor));
  return lines;
}

std::vector<std::string> describe_values(const char* kind, const NamedTensors& tensors) {
  std::vector<std::string> lines;
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor values = tensor.detach().cpu().contiguous();
    const std::string_view bytes(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
    lines.push_back(fmt::format("{} with values of hash {:016x}", describe(kind, name, values),
                                std::hash<std::string_view>()(bytes)));
  }
  return lines;
}

void check_same_model(const ProcessGroup& group, const char* call, const char* what,
                      const std::function<std::vector<std::string>()>& lines) {
  const auto found =
      first_difference(texts_of_all_ranks(group, call, [&] { return fmt::format("{}\n", fmt::join(lines(), "\n")); }));
  if (!found) return;
  throw ModelMismatch(
      fmt::format("{}: rank 0 has {}, rank {} has {}", what, found->reference, found->rank, found->other),
      {.rank = found->rank, .call = call});
}

void check_all_wrapped(const NamedTensors& parameters, const std::vector<at::Tensor>& wrapped,
                       const ProcessGroup& group) {
  std::unordered_set<const void*> known;
  for (const at::Tensor& tensor : wrapped) known.insert(tensor.unsafeGetTensorImpl());
  for (const auto& [name, tensor] : parameters) {
    if (!tensor.requires_grad() || known.contains(tensor.unsafeGetTensorImpl())) continue;
    const std::string text = fmt::format(
        "parameter {} of rank {} was registered after the model was wrapped: its gradient would not be averaged. Wrap "
        "the model again on all ranks",
        name, group.rank());
    group.abort(text);
    throw ModelMismatch(text, {.rank = group.rank(), .call = "DistributedDataParallel"});
  }
}

void rethrow_with_advice() {
  constexpr const char* kAdvice = "; if the ranks have different numbers of batches, run the loop in ddpkit::join()";
  try {
    throw;
  } catch (const CollectiveMismatch& error) {
    throw CollectiveMismatch(error.what() + std::string(kAdvice), error.context());
  } catch (const PeerLost& error) {
    // No advice if the rank died or reported an error.
    if (std::string_view(error.what()).find("has left the group") == std::string_view::npos) throw;
    throw PeerLost(error.what() + std::string(kAdvice), error.context());
  }
}

ParameterAgreement::ParameterAgreement(const std::vector<NamedParameter>& trained, std::vector<NamedParameter> frozen,
                                       ProcessGroup group)
    : trained_(trained), frozen_(std::move(frozen)), group_(std::move(group)) {
  for (const auto& [name, tensor, sparse] : trained)
    agreed_.push_back({tensor.scalar_type(), tensor.device(), tensor.sizes().vec()});
}

void ParameterAgreement::fail(const std::string& text) const {
  group_.abort(text);
  throw ModelMismatch(text, {.rank = group_.rank(), .call = "forward"});
}

void ParameterAgreement::check() const {
  for (std::size_t i = 0; i < trained_.size(); ++i) {
    const at::Tensor& tensor = trained_[i].tensor;
    const Agreed& agreed = agreed_[i];
    if (tensor.scalar_type() == agreed.dtype && tensor.device() == agreed.device &&
        tensor.sizes() == at::IntArrayRef(agreed.sizes))
      continue;
    const auto kind = [](at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
      return fmt::format("[{}] {} on {}", fmt::join(sizes, ", "), c10::toString(dtype), device.str());
    };
    fail(
        fmt::format("parameter {} is {} on rank {}, but was {} when the model was wrapped: convert, move or resize a "
                    "model before wrapping, or wrap it again on all ranks",
                    trained_[i].name, kind(tensor.sizes(), tensor.scalar_type(), tensor.device()), group_.rank(),
                    kind(agreed.sizes, agreed.dtype, agreed.device)));
  }
  for (const NamedParameter& parameter : frozen_) {
    if (parameter.tensor.requires_grad())
      fail(
          fmt::format("requires_grad of parameter {} is true on rank {}, but was false when the model was wrapped: its "
                      "gradient would not be averaged. Wrap the model again on all ranks after unfreezing parameters",
                      parameter.name, group_.rank()));
  }
}

Strides agree_on_strides(const std::vector<NamedParameter>& parameters, const ProcessGroup& group) {
  std::vector<std::int64_t> numbers;
  for (const auto& [name, tensor, sparse] : parameters) {
    // AccumulateGrad has the same condition.
    const bool dense = tensor.is_non_overlapping_and_dense();
    const at::DimVector strides = dense ? at::DimVector(tensor.strides()) : c10::contiguous_strides(tensor.sizes());
    numbers.insert(numbers.end(), strides.begin(), strides.end());
  }
  numbers = numbers_of_rank_0(numbers, group);
  Strides strides;
  auto next = numbers.begin();
  for (const auto& [name, tensor, sparse] : parameters) {
    strides.emplace_back(next, next + tensor.dim());
    next += tensor.dim();
  }
  return strides;
}

std::vector<std::size_t> agree_on_order(const std::vector<std::size_t>& arrivals, std::size_t count,
                                        const ProcessGroup& group) {
  std::vector<std::int64_t> numbers;
  std::vector<bool> seen(count, false);
  for (const std::size_t index : arrivals) {
    numbers.push_back(static_cast<std::int64_t>(index));
    seen[index] = true;
  }
  for (std::size_t i = count; i-- > 0;) {
    if (!seen[i]) numbers.push_back(static_cast<std::int64_t>(i));
  }
  std::vector<std::size_t> order;
  seen.assign(count, false);
  for (const std::int64_t number : numbers_of_rank_0(numbers, group)) {
    const auto index = static_cast<std::size_t>(number);
    // On a device, a failed broadcast is detected only later.
    if (index >= count || seen[index])
      throw Error("the ranks could not agree on an order of buckets: a broadcast has failed",
                  {.rank = group.rank(), .call = "backward"});
    seen[index] = true;
    order.push_back(index);
  }
  return order;
}

}  // namespace ddpkit
