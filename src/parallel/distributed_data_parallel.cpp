#include <ddpkit/parallel/distributed_data_parallel.h>

#include <cmath>
#include <unordered_set>

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/comm/error.h>

namespace ddpkit {
namespace {

std::string signature(const char* kind, const std::string& name, const at::Tensor& tensor) {
  return fmt::format("{} {} [{}] {}{}", kind, name, fmt::join(tensor.sizes(), ", "),
                     c10::toString(tensor.scalar_type()),
                     tensor.requires_grad() || std::string_view(kind) == "buffer" ? "" : " (wants no gradient)");
}

/// One line a parameter and buffer: what must be the same on all ranks.
std::vector<std::string> signatures(const torch::nn::Module& module) {
  std::vector<std::string> lines;
  for (const auto& item : module.named_parameters()) lines.push_back(signature("parameter", item.key(), item.value()));
  for (const auto& item : module.named_buffers()) lines.push_back(signature("buffer", item.key(), item.value()));
  return lines;
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

void check_same_on_all_ranks(const torch::nn::Module& module, const ProcessGroup& group) {
  if (group.world_size() == 1) return;
  const auto texts = group.all_gather_bytes(fmt::format("{}\n", fmt::join(signatures(module), "\n")));
  const auto reference = split_lines(texts[0]);
  for (std::size_t r = 1; r < texts.size(); ++r) {
    if (texts[r] == texts[0]) continue;
    const auto other = split_lines(texts[r]);
    std::size_t line = 0;
    while (line < reference.size() && line < other.size() && reference[line] == other[line]) ++line;
    const auto at = [line](const std::vector<std::string>& lines) {
      return line < lines.size() ? lines[line] : std::string("nothing more");
    };
    throw ModelMismatch(
        fmt::format("the model differs between ranks: rank 0 has {}, rank {} has {}", at(reference), r, at(other)),
        {.rank = static_cast<int>(r), .call = "DistributedDataParallel"});
  }
}

/// Gives every rank rank 0's values, many tensors to a message.
void broadcast_all(const std::vector<at::Tensor>& tensors, const ProcessGroup& group) {
  if (group.world_size() == 1) return;
  const at::NoGradGuard no_grad;
  constexpr std::size_t kMessageBytes = std::size_t{32} << 20;
  for (std::size_t begin = 0; begin < tensors.size();) {
    const at::ScalarType dtype = tensors[begin].scalar_type();
    std::size_t end = begin;
    std::int64_t numel = 0;
    while (end < tensors.size() && tensors[end].scalar_type() == dtype &&
           (end == begin || static_cast<std::size_t>(numel) * c10::elementSize(dtype) < kMessageBytes))
      numel += tensors[end++].numel();
    const at::Tensor flat = at::empty({numel}, tensors[begin].options().requires_grad(false));
    const auto for_each_part = [&](const auto& action) {
      std::int64_t offset = 0;
      for (std::size_t i = begin; i < end; ++i) {
        const at::Tensor part = flat.narrow(0, offset, tensors[i].numel()).view(tensors[i].sizes());
        action(tensors[i], part);
        offset += tensors[i].numel();
      }
    };
    if (group.rank() == 0) for_each_part([](const at::Tensor& tensor, const at::Tensor& part) { part.copy_(tensor); });
    group.broadcast(flat);
    if (group.rank() != 0) for_each_part([](const at::Tensor& tensor, const at::Tensor& part) { tensor.copy_(part); });
    begin = end;
  }
}

std::vector<NamedParameter> trainable_parameters(const torch::nn::Module& module, const ProcessGroup& group) {
  std::vector<NamedParameter> parameters;
  // A tied parameter is registered under two names but has one gradient.
  std::unordered_set<const void*> seen;
  for (const auto& item : module.named_parameters()) {
    if (!item.value().requires_grad() || !seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    if (item.value().device() != group.device())
      throw InvalidArgument(
          fmt::format("parameter {} is on {}, but the group's device is {}: move the model first "
                      "(model->to(group.device()))",
                      item.key(), item.value().device().str(), group.device().str()));
    parameters.push_back({item.key(), item.value()});
  }
  if (parameters.empty())
    throw InvalidArgument("DistributedDataParallel needs a module with at least one parameter that wants a gradient");
  return parameters;
}

std::size_t bytes_of(double mebibytes, const char* name) {
  if (!(mebibytes > 0) || !std::isfinite(mebibytes))
    throw InvalidArgument(fmt::format("{} is {}, but must be positive", name, mebibytes));
  return static_cast<std::size_t>(mebibytes * (1 << 20));
}

}  // namespace

DistributedDataParallelBase::NoSync::NoSync(Reducer& reducer) : reducer_(&reducer), before_(reducer.synchronize()) {
  reducer.set_synchronize(false);
}

DistributedDataParallelBase::NoSync::~NoSync() { reducer_->set_synchronize(before_); }

DistributedDataParallelBase::DistributedDataParallelBase(torch::nn::Module& module, ProcessGroup group,
                                                         const DistributedDataParallelOptions& options)
    : group_(std::move(group)), module_(&module), options_(options) {
  check_same_on_all_ranks(module, group_);
  auto parameters = trainable_parameters(module, group_);
  std::vector<at::Tensor> everything;
  for (const at::Tensor& parameter : module.parameters()) everything.push_back(parameter);
  for (const at::Tensor& buffer : module.buffers()) buffers_.push_back(buffer);
  everything.insert(everything.end(), buffers_.begin(), buffers_.end());
  broadcast_all(everything, group_);
  reducer_ = std::make_unique<Reducer>(
      std::move(parameters), group_,
      ReducerOptions{.first_bucket_bytes = bytes_of(options.first_bucket_cap_mb, "first_bucket_cap_mb"),
                     .bucket_bytes = bytes_of(options.bucket_cap_mb, "bucket_cap_mb")});
}

void DistributedDataParallelBase::before_forward() {
  if (!options_.broadcast_buffers || buffers_.empty() || !module_->is_training()) return;
  // While gradients only accumulate, ranks may run different numbers of forwards.
  if (!reducer_->synchronize()) return;
  broadcast_all(buffers_, group_);
}

}  // namespace ddpkit
