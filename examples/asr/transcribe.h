// Tier 2: torch/nn/module.h, through options.h.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "asr/options.h"

namespace asr {

/// Transcribes a recording with `model`, which is in eval mode. Throws AudioError.
std::string transcribe(Recognizer& model, const Options& options, const std::string& file);

/// Transcribes with the recurrent form, as a stream: in pieces of `piece_ms`, without later pieces. Calls `on_text`
/// with the new text of each piece. The normalisation uses the features received so far, so the first words may differ
/// from transcribe(). Greedy decoding.
void transcribe_stream(Recognizer& model, const Options& options, const std::string& file, double piece_ms,
                       const std::function<void(double seconds, const std::string& text)>& on_text);

}  // namespace asr
