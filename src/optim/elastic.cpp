#include "optim/elastic.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/hash.h>
#include <fmt/format.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <ddpkit/error.h>

#include "comm/backend.h"
#include "comm/joining.h"
#include "data/length_bucketed_sampler.h"
#include "parallel/ddp/reducer.h"

namespace ddpkit::optim {

namespace {

constexpr std::int64_t kEndBytes = 64;

/// Returns the bytes at both ends of a dense tensor.
at::Tensor ends_of(const at::Tensor& parameter) {
  const at::Tensor flat = parameter.detach().view({-1});
  const std::int64_t count = std::min(flat.numel(), std::max<std::int64_t>(kEndBytes / flat.element_size(), 1));
  return at::cat({flat.narrow(0, 0, count), flat.narrow(0, flat.numel() - count, count)}).view(at::kByte);
}

std::size_t hash_of(const void* bytes, std::size_t size) {
  return std::hash<std::string_view>()({static_cast<const char*>(bytes), size});
}

}  // namespace

Elastic::Impl::Impl(DistributedDataParallelBase& wrapper, torch::nn::Module& module, sampling::Regroupable& data,
                    ElasticOptions options)
    : ddp(wrapper),
      sampler(data),
      state(wrapper),
      options_(std::move(options)),
      parameters_(module.parameters()),
      buffers_(module.buffers()) {
  if (!Backend::of(ddp.group())->is_elastic())
    throw InvalidArgument("Elastic: the group was created without InitOptions::elastic");
  if (options_.min_ranks < 1)
    throw InvalidArgument(fmt::format("Elastic: min_ranks is {}, but must be at least 1", options_.min_ranks));
  Reducer::Impl::of(ddp.reducer()).require_replicas("Elastic");
  for (const at::Tensor& buffer : buffers_) saved_buffers_.push_back(at::empty_like(buffer.detach()));
  generators_ = {at::globalContext().defaultGenerator(at::kCPU)};
  if (!ddp.group().device().is_cpu()) generators_.push_back(at::globalContext().defaultGenerator(ddp.group().device()));
  random_states_.resize(generators_.size());
  check_steps();
}

/// Hashes both ends of each parameter: torch's optimizers write through Tensor::data(), which counts no version. One
/// copy brings the ends of all parameters of a device to the host.
std::size_t Elastic::Impl::fingerprint() const {
  std::size_t hash = 0;
  std::vector<at::Tensor> on_device;
  for (const at::Tensor& parameter : parameters_) {
    hash = c10::hash_combine(hash, static_cast<std::size_t>(parameter._version()));
    if (!parameter.is_contiguous() || parameter.numel() == 0) continue;
    if (!parameter.is_cpu()) {
      on_device.push_back(ends_of(parameter));
      continue;
    }
    const auto* const bytes = static_cast<const char*>(parameter.const_data_ptr());
    const std::size_t size = parameter.nbytes(), end = std::min<std::size_t>(size, kEndBytes);
    hash = c10::hash_combine(hash, hash_of(bytes, end));
    hash = c10::hash_combine(hash, hash_of(bytes + size - end, end));
  }
  if (on_device.empty()) return hash;
  const at::Tensor ends = at::cat(on_device).cpu();
  return c10::hash_combine(hash, hash_of(ends.const_data_ptr(), ends.nbytes()));
}

void Elastic::Impl::begin_step() {
  if (takes_new_ranks && Joining::is_due(ddp.group(), static_cast<std::uint64_t>(steps))) {
    joins_ = true;
    throw PeerLost("new ranks join", {});
  }
  begin();
}

void Elastic::Impl::begin() {
  const at::NoGradGuard no_grad;
  fingerprint_ = fingerprint();
  for (std::size_t i = 0; i < buffers_.size(); ++i) saved_buffers_[i].copy_(buffers_[i]);
  for (std::size_t i = 0; i < generators_.size(); ++i) {
    const std::lock_guard lock(generators_[i].mutex());
    random_states_[i] = generators_[i].get_state();
  }
  for (const Part& part : parts) part.save();
  undoes_ = true;
}

void Elastic::Impl::add_step(std::size_t samples) {
  sampler.add_trained(samples);
  ++steps;
  end();
}

void Elastic::Impl::roll_back() {
  const at::NoGradGuard no_grad;
  if (fingerprint() != fingerprint_)
    throw Error(
        "Elastic: a rank was lost after the step had changed weights, and the change cannot be undone: call one "
        "optimizer step per Elastic::step(), after its last collective");
  for (std::size_t i = 0; i < buffers_.size(); ++i) buffers_[i].copy_(saved_buffers_[i]);
  for (std::size_t i = 0; i < generators_.size(); ++i) {
    const std::lock_guard lock(generators_[i].mutex());
    generators_[i].set_state(random_states_[i]);
  }
  for (const Part& part : parts) part.roll_back();
}

/// Ranks that had completed different steps would continue with different weights.
void Elastic::Impl::check_steps() const {
  const auto counts = ddp.group().all_gather_bytes(std::to_string(steps));
  for (std::size_t r = 0; r < counts.size(); ++r) {
    if (counts[r] != counts[0])
      throw Error(fmt::format("Elastic: rank {} has completed {} steps, but rank 0 {}; their weights differ", r,
                              counts[r], counts[0]),
                  {.rank = static_cast<int>(r)});
  }
}

void Elastic::Impl::Progress::save(torch::serialize::OutputArchive& archive) const {
  archive.write("steps", c10::IValue(of.steps));
  of.sampler.save(archive);
}

void Elastic::Impl::Progress::load(torch::serialize::InputArchive& archive) {
  c10::IValue value;
  archive.read("steps", value);
  of.steps = value.toInt();
  of.sampler.load(archive);
}

void Elastic::Impl::adapt(const Regroup& change) {
  const ProcessGroup& group = ddp.group();
  const auto new_ranks = static_cast<int>(std::ranges::count(change.old_rank_of, -1));
  sampler.regroup(group.world_size(), group.rank());
  ddp.regroup(new_ranks);
  if (new_ranks > 0) state.copy_to_new(new_ranks);
  check_steps();
  if (options_.on_change) options_.on_change(change);
}

void Elastic::Impl::recover(std::string cause) {
  const ProcessGroup& group = ddp.group();
  if (undoes_) roll_back();
  for (;;) {
    std::optional<Regroup> change;
    if (!std::exchange(joins_, false)) change = group.shrink(options_.min_ranks);
    try {
      adapt(change ? *change : Joining::admit(group));
    } catch (const PeerLost& error) {
      cause = error.what();
      continue;
    }
    if (group.rank() != 0) return;
    const std::string text = fmt::format("[ddpkit] {}; {} rank{} from step {}\n", cause, group.world_size(),
                                         group.world_size() == 1 ? " continues" : "s continue", steps);
    std::fwrite(text.data(), 1, text.size(), stderr);
    return;
  }
}

void Elastic::Impl::join() {
  if (!takes_new_ranks)
    throw InvalidArgument(
        "Elastic: a new rank needs the state of the optimizer: pass the optimizer to the constructor, after the "
        "options");
  {
    // The first gradients then find the pages of the arena allocated.
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : parameters_) gradients.push_back(at::empty_like(parameter.detach()));
  }
  adapt(Joining::join(ddp.group()));
}

Elastic::Elastic(Begin /*begin*/, DistributedDataParallelBase& ddp, torch::nn::Module& module,
                 ResumableSampler& sampler, const ElasticOptions& options)
    : impl_(std::make_unique<Impl>(ddp, module, ResumableSampler::Impl::of(sampler), options)) {
  impl_->state.add(impl_->progress);
}
Elastic::Elastic(Begin /*begin*/, DistributedDataParallelBase& ddp, torch::nn::Module& module,
                 LengthBucketedSampler& sampler, const ElasticOptions& options)
    : impl_(std::make_unique<Impl>(ddp, module, LengthBucketedSampler::Impl::of(sampler), options)) {
  impl_->state.add(impl_->progress);
}
Elastic::~Elastic() = default;

void Elastic::add(std::function<void()> save, std::function<void()> roll_back) {
  impl_->parts.push_back({std::move(save), std::move(roll_back)});
}

JoinState& Elastic::state() noexcept { return impl_->state; }

void Elastic::join(bool has_optimizer) {
  impl_->takes_new_ranks = has_optimizer;
  if (has_optimizer) impl_->state.prepare();
  if (impl_->ddp.group().is_joining()) impl_->join();
}

bool Elastic::step(std::int64_t samples, const std::function<void()>& train) {
  if (samples < 0) throw InvalidArgument(fmt::format("Elastic: a step has {} samples", samples));
  try {
    impl_->begin_step();
    train();
  } catch (const PeerLost& error) {
    impl_->recover(error.what());
    impl_->interrupted = true;
    return false;
  }
  impl_->add_step(static_cast<std::size_t>(samples));
  return true;
}

bool Elastic::interrupted() noexcept { return std::exchange(impl_->interrupted, false); }

void Elastic::retry(const std::function<void()>& action) {
  for (;;) {
    impl_->begin();
    try {
      action();
      impl_->ddp.group().barrier();  // A collective that one rank completes, all complete.
      impl_->end();
      return;
    } catch (const PeerLost& error) {
      impl_->recover(error.what());
    }
  }
}

std::int64_t Elastic::steps() const noexcept { return impl_->steps; }

}  // namespace ddpkit::optim
