#include "asr/transcribe.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "asr/audio.h"
#include "asr/decoder.h"
#include "asr/evaluation.h"

namespace asr {

std::string transcribe(Recognizer& model, const Options& options, const std::string& file) {
  const torch::NoGradGuard no_grad;
  const LogMel log_mel(options.features);
  const at::Tensor features = normalised(log_mel(read_audio(file, options.features.sample_rate)));
  const at::Tensor logits = model.forward(features.unsqueeze(0));
  return transcript(torch::log_softmax(logits.squeeze(0), 1), options.evaluation);
}

void transcribe_stream(Recognizer& model, const Options& options, const std::string& file, double piece_ms,
                       const std::function<void(double seconds, const std::string& text)>& on_text) {
  const LogMel log_mel(options.features);
  const std::vector<float> sound = read_audio(file, options.features.sample_rate);
  RunningNormaliser normalise(model.feature_mean, model.feature_deviation);
  StreamState state;
  GreedyDecoder decoder;
  const Alphabet alphabet;
  const auto piece =
      std::max<std::size_t>(1, static_cast<std::size_t>(std::llround(piece_ms * options.features.sample_rate / 1000)));
  const auto window = static_cast<std::size_t>(log_mel.window()), hop = static_cast<std::size_t>(log_mel.hop());
  std::vector<float> waiting;  // Samples of incomplete frames.
  for (std::size_t begin = 0; begin < sound.size(); begin += piece) {
    const std::size_t end = std::min(begin + piece, sound.size());
    waiting.insert(waiting.end(), sound.begin() + static_cast<std::ptrdiff_t>(begin),
                   sound.begin() + static_cast<std::ptrdiff_t>(end));
    const bool is_all_of_it = end == sound.size() && sound.size() < window;  // Pads the frame with silence.
    if (waiting.size() < window && !is_all_of_it) continue;
    const at::Tensor features = normalise(log_mel(waiting));
    const std::size_t taken = static_cast<std::size_t>(features.size(0)) * hop;
    waiting.erase(waiting.begin(), waiting.begin() + static_cast<std::ptrdiff_t>(std::min(taken, waiting.size())));
    const std::vector<std::int64_t> labels = decoder.add(model.stream(features, state));
    if (!labels.empty()) on_text(static_cast<double>(end) / options.features.sample_rate, alphabet.decode(labels));
  }
}

}  // namespace asr
