// Tier 2: torch/nn/module.h, through options.h.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "asr/options.h"

namespace asr {

/// What is said in a recording, by the model in `model`, which is in eval mode. Throws AudioError.
std::string transcribe(Recognizer& model, const Options& options, const std::string& file);

/// The same through the recurrent form, as if it were just being recorded: in pieces of `piece_ms`, none of which waits
/// for a later one; `on_text` is given what each adds. Features are normalised by what has been heard so far, so that
/// the first words may come out differently. Greedy decoding.
void transcribe_stream(Recognizer& model, const Options& options, const std::string& file, double piece_ms,
                       const std::function<void(double seconds, const std::string& text)>& on_text);

}  // namespace asr
