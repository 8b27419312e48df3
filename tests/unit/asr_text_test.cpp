#include <torch/torch.h>

#include <cmath>
#include <map>

#include <ddpkit/train/text.h>

#include "asr/alphabet.h"
#include "asr/decoder.h"
#include "asr/score.h"
#include "support/catch.h"

using asr::Alphabet;
using asr::normalise;
using Labels = std::vector<std::int64_t>;

TEST_CASE("transcripts are normalised and come back from their labels", "[asr]") {
  CHECK(normalise("  Hello,  World! ") == "hello world");
  CHECK(normalise("I\u2019m sorry\u2014no.") == "i'm sorry no");
  CHECK(normalise("...") == "");
  CHECK(normalise("De-activated") == "de activated");
  const Alphabet alphabet;
  CHECK(alphabet.size() == 29);
  const auto labels = alphabet.encode("it's a zebra");
  REQUIRE(labels);
  CHECK(alphabet.decode(*labels) == "it's a zebra");
  CHECK_FALSE(alphabet.encode(normalise("press 1")));
  CHECK(asr::unknown_character(normalise("press 1")) == "'1'");
  CHECK(asr::unknown_character(normalise("caf\u00e9s")) == "'\u00e9'");
  CHECK(asr::unknown_character("\xff").size() == 3);
  CHECK(asr::unknown_character("fine").empty());
}

TEST_CASE("edit distances and error rates", "[asr]") {
  const auto distance = [](const std::string& a, const std::string& b) { return ddpkit::train::edit_distance(a, b); };
  CHECK(distance("kitten", "sitting") == 3);
  CHECK(distance("", "abc") == 3);
  CHECK(distance("abc", "") == 3);
  CHECK(distance("abc", "abc") == 0);
  asr::ErrorCounts counts;
  counts.add("one two three", "one too three four");
  counts.add("six", "");
  CHECK(counts.words == 4);
  CHECK(counts.word_edits == 3);
  CHECK(counts.wer() == Approx(0.75));
  CHECK(counts.characters == 16);
  CHECK(counts.character_edits == 1 + 5 + 3);
}

TEST_CASE("greedy decoding drops repetitions, then blanks, also across pieces", "[asr]") {
  const auto frames = [](const Labels& best) {
    at::Tensor scores = torch::zeros({static_cast<std::int64_t>(best.size()), 5});
    for (std::size_t t = 0; t < best.size(); ++t) scores[static_cast<std::int64_t>(t)][best[t]] = 1;
    return scores;
  };
  CHECK(asr::greedy_decode(frames({0, 1, 1, 0, 1, 2, 2, 0, 0, 3})) == Labels{1, 1, 2, 3});
  CHECK(asr::greedy_decode(torch::zeros({0, 5})).empty());
  asr::GreedyDecoder decoder;
  CHECK(decoder.add(frames({1, 1})) == Labels{1});
  CHECK(decoder.add(frames({1, 0, 1})) == Labels{1});
}

TEST_CASE("a wide prefix beam finds the labels whose paths are likeliest together", "[asr]") {
  // Sums all paths by their labels.
  constexpr std::int64_t kSteps = 5, kLabels = 3;
  for (int seed = 0; seed < 20; ++seed) {
    CAPTURE(seed);
    torch::manual_seed(seed);
    const at::Tensor log_probs = torch::log_softmax(torch::randn({kSteps, kLabels}) * 1.5, 1);
    std::map<Labels, double> sums;
    for (int path = 0; path < 243; ++path) {
      Labels best;
      double log_probability = 0;
      std::int64_t last = 0;
      for (int t = 0, rest = path; t < kSteps; ++t, rest /= 3) {
        const std::int64_t label = rest % 3;
        log_probability += log_probs[t][label].item<double>();
        if (label != 0 && label != last) best.push_back(label);
        last = label;
      }
      sums[best] += std::exp(log_probability);
    }
    const auto likeliest =
        std::max_element(sums.begin(), sums.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
    const auto found = asr::prefix_beam_search(log_probs, 1000, -1e9);
    CHECK(found.front().labels == likeliest->first);
    CHECK(found.size() == sums.size());
    for (const auto& hypothesis : found)
      CHECK(std::exp(hypothesis.log_probability) == Approx(sums.at(hypothesis.labels)).epsilon(1e-5));
  }
}

TEST_CASE("a prefix beam beats the best path where many paths share their labels", "[asr]") {
  // Graves' example: blank is the most likely label in both frames, but "a" has three of the four other paths.
  const at::Tensor log_probs = torch::log(torch::tensor({{0.6, 0.4}, {0.6, 0.4}}));
  CHECK(asr::greedy_decode(log_probs).empty());
  CHECK(asr::prefix_beam_search(log_probs, 4).front().labels == Labels{1});
  CHECK_THROWS_WITH(asr::prefix_beam_search(log_probs, 0), ContainsSubstring("a beam of 0"));
}
