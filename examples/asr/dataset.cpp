#include "asr/dataset.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <algorithm>

#include <fmt/format.h>

#include <ddpkit/train/metrics.h>
#include <ddpkit/train/seed.h>
#include <ddpkit/train/text.h>
#include <ddpkit/train/together.h>

#include "asr/audio.h"

namespace asr {
namespace {

using ddpkit::train::in_quotes;

constexpr double kSumsUnit = 1 << 20;

}  // namespace

FeatureSums::FeatureSums(std::int64_t mels) : moments(torch::zeros({2, mels}, torch::kLong)) {}

void FeatureSums::add(const FeatureSums& other) {
  // Not in place: a checkpoint that is being written may still read the previous sums.
  moments = moments + other.moments;
  frames += other.frames;
}

std::pair<at::Tensor, at::Tensor> FeatureSums::statistics(const ddpkit::ProcessGroup& group) const {
  const at::Tensor sums = moments.to(torch::kDouble) / kSumsUnit;
  std::vector<double> values(sums.const_data_ptr<double>(), sums.const_data_ptr<double>() + sums.numel());
  values.push_back(static_cast<double>(frames));
  values = ddpkit::train::sum_over_ranks(values, group);
  const double count = std::max(values.back(), 1.0);
  values.pop_back();
  const at::Tensor means = torch::tensor(values, torch::kDouble).reshape({2, -1}) / count;
  const at::Tensor variance = (means[1] - means[0].square()).clamp_min(1e-8);
  return {means[0].to(torch::kFloat), variance.sqrt().to(torch::kFloat)};
}

void FeatureSums::save(torch::serialize::OutputArchive& archive) const {
  archive.write("moments", moments);
  archive.write("frames", c10::IValue(frames));
}

void FeatureSums::load(torch::serialize::InputArchive& archive) {
  archive.read("moments", moments);
  c10::IValue value;
  archive.read("frames", value);
  frames = value.toInt();
}

Batch Batch::to(c10::Device device) const {
  if (device.is_cpu()) return *this;
  Batch moved = *this;
  moved.features = features.to(device);
  moved.weights = weights.to(device);
  if (noise.defined()) moved.noise = noise.to(device);
  return moved;
}

Batch Batch::keeping(const std::vector<bool>& keep) const {
  Batch kept = *this;
  std::vector<std::int64_t> rows;
  std::vector<at::Tensor> labels;
  std::int64_t begin = 0;
  kept.utterances.clear();
  for (std::int64_t row = 0; row < size(); ++row) {
    const std::int64_t length = target_lengths[row].item<std::int64_t>();
    if (keep[static_cast<std::size_t>(row)]) {
      rows.push_back(row);
      labels.push_back(targets.slice(0, begin, begin + length));
      kept.utterances.push_back(utterances[static_cast<std::size_t>(row)]);
    }
    begin += length;
  }
  if (rows.empty()) {
    // Keeps one utterance: the collectives of forward and backward need input.
    kept.utterances = {utterances.front()};
    kept.features = torch::zeros_like(features.slice(0, 0, 1));
    kept.frames = frames.slice(0, 0, 1);
    kept.target_lengths = target_lengths.slice(0, 0, 1);
    kept.targets = targets.slice(0, 0, target_lengths[0].item<std::int64_t>());
    kept.weights = torch::zeros_like(weights.slice(0, 0, 1));
    if (noise.defined()) kept.noise = noise.slice(0, 0, 1);
    return kept;
  }
  const at::Tensor index = torch::tensor(rows);
  const at::Tensor there = index.to(features.device());
  kept.features = features.index_select(0, there);
  kept.weights = weights.index_select(0, there);
  if (noise.defined()) kept.noise = noise.index_select(0, there);
  kept.frames = frames.index_select(0, index);
  kept.target_lengths = target_lengths.index_select(0, index);
  kept.targets = torch::cat(labels);
  return kept;
}

Dataset::Dataset(std::vector<Utterance> utterances, const DatasetOptions& options, Faults& faults,
                 const ddpkit::ProcessGroup& group)
    : utterances_(std::move(utterances)),
      log_mel_(options.features),
      faults_(faults),
      cache_bytes_(static_cast<std::size_t>(options.cache_mb * (1 << 20))) {
  scan(options, group);
  cache_.assign(utterances_.size(), {.features = {}, .sums = FeatureSums(options.features.mels)});
}

void Dataset::scan(const DatasetOptions& options, const ddpkit::ProcessGroup& group) {
  const auto size = static_cast<std::int64_t>(utterances_.size());
  const auto share = ddpkit::train::evaluation_share(size, group.rank(), group.world_size());
  std::vector<double> frames(utterances_.size(), 0);  // 0: a fault. First this rank's share, then all ranks'.
  ddpkit::train::run_together(group, [&] {
    for (std::int64_t i = share.begin; i < share.end; ++i) {
      const Utterance& utterance = utterances_[static_cast<std::size_t>(i)];
      const std::string file = utterance.where();
      const auto target = alphabet_.encode(utterance.text);
      if (utterance.text.empty()) {
        faults_.add(Fault::kEmptyTranscript, file, file + ": its transcript is empty");
        continue;
      }
      if (!target) {
        faults_.add(Fault::kUnknownCharacter, file,
                    fmt::format("{}: {} in its transcript {} is not in the alphabet", file,
                                unknown_character(utterance.text), in_quotes(utterance.text)));
        continue;
      }
      try {
        const AudioInfo info = audio_info(utterance.file, utterance.segment);
        const std::int64_t count = log_mel_.frames(info.samples * log_mel_.options().sample_rate / info.sample_rate);
        // CTC needs a blank between two equal labels.
        std::int64_t needed = static_cast<std::int64_t>(target->size());
        for (std::size_t at = 1; at < target->size(); ++at) needed += (*target)[at] == (*target)[at - 1] ? 1 : 0;
        if (options.output_frames(count) < needed) {
          faults_.add(Fault::kTooShort, file,
                      fmt::format("{}: its {:.2f} s make {} steps of the model, but \"{}\" needs {}", file,
                                  info.seconds(), options.output_frames(count), utterance.text, needed));
          continue;
        }
        frames[static_cast<std::size_t>(i)] = static_cast<double>(count);
      } catch (const AudioError& error) {
        faults_.add(Fault::kUnreadable, file, error.what());
      }
    }
  });
  frames = ddpkit::train::sum_over_ranks(frames, group);
  std::vector<Utterance> good;
  for (std::size_t i = 0; i < utterances_.size(); ++i) {
    if (frames[i] == 0) continue;
    good.push_back(std::move(utterances_[i]));
    good.back().frames = static_cast<std::int64_t>(frames[i]);
  }
  utterances_ = std::move(good);
  if (utterances_.empty()) throw ddpkit::InvalidArgument(fmt::format("{}: no utterance to use in it", options.name));
}

std::vector<std::int64_t> Dataset::lengths() const {
  std::vector<std::int64_t> lengths;
  for (const Utterance& utterance : utterances_) lengths.push_back(utterance.frames);
  return lengths;
}

double Dataset::seconds() const {
  double frames = 0;
  for (const Utterance& utterance : utterances_) frames += static_cast<double>(utterance.frames);
  return frames * log_mel_.options().hop_ms / 1000;
}

Dataset::Computed Dataset::computed(std::size_t index) const {
  {
    const std::lock_guard lock(mutex_);
    if (cache_[index].features.defined()) return cache_[index];
  }
  const Utterance& utterance = utterances_[index];
  Computed result{.features = {}, .sums = FeatureSums(log_mel_.options().mels)};
  at::Tensor raw;
  try {
    raw = log_mel_(read_audio(utterance.file, log_mel_.options().sample_rate, utterance.segment));
  } catch (const AudioError& error) {
    faults_.add(Fault::kUnreadable, utterance.where(), error.what());
    return result;
  }
  result.features = normalised(raw);
  const at::Tensor wide = raw.to(torch::kDouble);
  const at::Tensor moments = torch::stack({wide.sum(0), wide.square().sum(0)}) * kSumsUnit;
  if (moments.isfinite().all().item<bool>()) {
    result.sums.moments = moments.round().to(torch::kLong);
    result.sums.frames = raw.size(0);
  }
  const auto bytes = static_cast<std::size_t>(result.features.nbytes());
  const std::lock_guard lock(mutex_);
  if (!cache_[index].features.defined() && cached_bytes_ + bytes <= cache_bytes_) {
    cache_[index] = result;
    cached_bytes_ += bytes;
  }
  return result;
}

Batch Dataset::batch(const std::vector<std::size_t>& indices, std::size_t repeated, std::size_t batch_size,
                     const std::optional<Augmentation>& augmentation) const {
  const torch::NoGradGuard no_grad;
  const auto count = static_cast<std::int64_t>(indices.size());
  Batch batch{.utterances = indices,
              .batch_size = static_cast<std::int64_t>(batch_size),
              .sums = FeatureSums(log_mel_.options().mels)};
  std::vector<at::Tensor> features, noise;
  std::vector<std::int64_t> frames, targets, target_lengths;
  batch.weights = torch::ones({count});
  for (std::size_t row = 0; row < indices.size(); ++row) {
    const Utterance& utterance = utterances_[indices[row]];
    const Computed computed = this->computed(indices[row]);
    at::Tensor one = computed.features;
    if (row >= indices.size() - repeated || !one.defined())
      batch.weights[static_cast<std::int64_t>(row)] = 0;
    else
      batch.sums.add(computed.sums);
    std::vector<std::int64_t> target = alphabet_.encode(utterance.text).value();
    if (!one.defined()) {
      // The recording is unreadable although its header was valid. Uses the shortest input of CTC: the header may have
      // announced any length.
      one = torch::zeros({1, log_mel_.options().mels});
      target.resize(1);
    }
    if (augmentation) {
      // The seed depends on the utterance, not on the rank.
      const std::uint64_t seed =
          ddpkit::train::epoch_seed(augmentation->seed, augmentation->epoch, static_cast<int>(indices[row]));
      if (augmentation->spec_augment) one = spec_augment(one, *augmentation->spec_augment, seed);
      if (augmentation->noise_layers > 0)
        noise.push_back(torch::rand({augmentation->noise_layers, augmentation->noise_width},
                                    at::make_generator<at::CPUGeneratorImpl>(seed)));
    }
    frames.push_back(one.size(0));
    features.push_back(std::move(one));
    targets.insert(targets.end(), target.begin(), target.end());
    target_lengths.push_back(static_cast<std::int64_t>(target.size()));
  }
  batch.features = torch::nn::utils::rnn::pad_sequence(features, /*batch_first=*/true);
  batch.frames = torch::tensor(frames);
  batch.targets = torch::tensor(targets);
  batch.target_lengths = torch::tensor(target_lengths);
  if (!noise.empty()) batch.noise = torch::stack(noise);
  return batch;
}

}  // namespace asr
