#include "asr/decoder.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "asr/alphabet.h"

namespace asr {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();

double log_add(double a, double b) {
  if (a < b) std::swap(a, b);
  return b == kNever ? a : a + std::log1p(std::exp(b - a));
}

// Log probabilities of the paths to a prefix that end in a blank, and of those that end in a label.
struct Ends {
  double in_blank = kNever;
  double in_label = kNever;

  double either() const { return log_add(in_blank, in_label); }
};

}  // namespace

std::vector<std::int64_t> GreedyDecoder::add(const at::Tensor& log_probs) {
  const at::Tensor best = log_probs.argmax(1).to(at::kCPU).contiguous();
  std::vector<std::int64_t> labels;
  const auto* values = best.const_data_ptr<std::int64_t>();
  for (std::int64_t frame = 0; frame < best.numel(); ++frame) {
    if (values[frame] != last_ && values[frame] != Alphabet::kBlank) labels.push_back(values[frame]);
    last_ = values[frame];
  }
  return labels;
}

std::vector<std::int64_t> greedy_decode(const at::Tensor& log_probs) { return GreedyDecoder().add(log_probs); }

std::vector<Hypothesis> prefix_beam_search(const at::Tensor& log_probs, std::int64_t beam, double least) {
  if (beam < 1) throw ddpkit::InvalidArgument(fmt::format("a beam of {} hypotheses: use at least 1", beam));
  using Prefix = std::vector<std::int64_t>;
  const at::Tensor table = log_probs.to(at::kCPU).contiguous();
  const auto* row = table.const_data_ptr<float>();
  const std::int64_t labels = table.size(1);
  std::vector<std::pair<Prefix, Ends>> kept = {{{}, {.in_blank = 0, .in_label = kNever}}};
  for (std::int64_t frame = 0; frame < table.size(0); ++frame, row += labels) {
    std::map<Prefix, Ends> next;
    for (const auto& [prefix, ends] : kept) {
      Ends& same = next[prefix];
      same.in_blank = log_add(same.in_blank, ends.either() + row[Alphabet::kBlank]);
      if (!prefix.empty()) same.in_label = log_add(same.in_label, ends.in_label + row[prefix.back()]);
      for (std::int64_t label = 0; label < labels; ++label) {
        if (label == Alphabet::kBlank || row[label] < least) continue;
        // The same label again needs a blank in between.
        const bool repeats = !prefix.empty() && prefix.back() == label;
        const double before = repeats ? ends.in_blank : ends.either();
        if (before == kNever) continue;
        Prefix longer = prefix;
        longer.push_back(label);
        Ends& grown = next[longer];
        grown.in_label = log_add(grown.in_label, before + row[label]);
      }
    }
    kept.assign(std::make_move_iterator(next.begin()), std::make_move_iterator(next.end()));
    const auto by_probability = [](const auto& a, const auto& b) { return a.second.either() > b.second.either(); };
    const auto count = std::min<std::size_t>(kept.size(), static_cast<std::size_t>(beam));
    std::partial_sort(kept.begin(), kept.begin() + static_cast<std::ptrdiff_t>(count), kept.end(), by_probability);
    kept.resize(count);
  }
  std::vector<Hypothesis> result;
  for (auto& [prefix, ends] : kept) result.push_back({.labels = std::move(prefix), .log_probability = ends.either()});
  return result;
}

}  // namespace asr
