#include "asr/evaluation.h"

#include <torch/torch.h>

#include <algorithm>
#include <numeric>

#include <ddpkit/train/metrics.h>

#include "asr/decoder.h"

namespace asr {

at::Tensor ctc_losses(const at::Tensor& logits, const at::Tensor& steps, const Batch& batch) {
  const at::Tensor log_probs = torch::log_softmax(logits, 2).transpose(0, 1);
  const at::Tensor losses =
      torch::ctc_loss(log_probs, batch.targets, steps, batch.target_lengths, Alphabet::kBlank, at::Reduction::None);
  return losses / batch.target_lengths.to(losses.device());
}

at::Tensor steps_of(const Recognizer& model, const Batch& batch) {
  at::Tensor steps = batch.frames.clone();
  auto* values = steps.data_ptr<std::int64_t>();
  std::transform(values, values + steps.numel(), values, [&](std::int64_t n) { return model.output_frames(n); });
  return steps;
}

std::string transcript(const at::Tensor& log_probs, const EvaluationOptions& options) {
  const std::vector<std::int64_t> labels =
      options.decoder == "beam" ? prefix_beam_search(log_probs, options.beam).front().labels : greedy_decode(log_probs);
  return Alphabet().decode(labels);
}

EvaluationResult evaluate(Recognizer& model, const Dataset& dataset, const EvaluationOptions& options,
                          const ddpkit::ProcessGroup& group) {
  const torch::NoGradGuard no_grad;
  model.eval();
  // Sorted from the longest to the shortest and dealt to the ranks in turn.
  std::vector<std::size_t> order(dataset.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return dataset[a].frames > dataset[b].frames; });
  std::vector<std::size_t> mine;
  const auto ranks = static_cast<std::size_t>(group.world_size());
  for (auto i = static_cast<std::size_t>(group.rank()); i < order.size(); i += ranks) mine.push_back(order[i]);
  EvaluationResult result;
  double loss = 0;
  const auto size = static_cast<std::size_t>(options.batch_size);
  for (std::size_t begin = 0; begin < mine.size(); begin += size) {
    const std::vector<std::size_t> indices(
        mine.begin() + static_cast<std::ptrdiff_t>(begin),
        mine.begin() + static_cast<std::ptrdiff_t>(std::min(begin + size, mine.size())));
    const Batch batch = dataset.batch(indices, 0, indices.size(), std::nullopt).to(group.device());
    const at::Tensor logits = model.forward(batch.features);
    const at::Tensor steps = steps_of(model, batch);
    const at::Tensor losses = ctc_losses(logits, steps, batch).to(torch::kCPU);
    const at::Tensor log_probs = torch::log_softmax(logits, 2).to(torch::kCPU);
    for (std::size_t row = 0; row < indices.size(); ++row) {
      const auto at = static_cast<std::int64_t>(row);
      if (batch.weights[at].item<float>() == 0) continue;  // The recording was unreadable.
      const Utterance& utterance = dataset[indices[row]];
      const std::string hypothesis = transcript(log_probs[at].slice(0, 0, steps[at].item<std::int64_t>()), options);
      result.errors.add(utterance.text, hypothesis);
      loss += losses[at].item<double>();
      if (static_cast<int>(result.samples.size()) < options.samples)
        result.samples.push_back({.name = utterance.name, .reference = utterance.text, .hypothesis = hypothesis});
    }
  }
  ErrorCounts& errors = result.errors;
  const std::vector<double> sums = ddpkit::train::sum_over_ranks(
      {loss, errors.utterances, errors.characters, errors.character_edits, errors.words, errors.word_edits}, group);
  errors = {.utterances = sums[1],
            .characters = sums[2],
            .character_edits = sums[3],
            .words = sums[4],
            .word_edits = sums[5]};
  result.loss = sums[0] / errors.utterances;
  return result;
}

}  // namespace asr
