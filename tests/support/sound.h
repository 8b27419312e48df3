// Recordings for tests.
#pragma once

#include <sndfile.h>

#include <cmath>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace ddpkit::testing {

/// `format`: such as SF_FORMAT_WAV | SF_FORMAT_PCM_16. Samples of all channels, interleaved.
inline void write_sound(const std::filesystem::path& path, const std::vector<float>& samples, int rate = 8000,
                        int format = SF_FORMAT_WAV | SF_FORMAT_PCM_16, int channels = 1) {
  std::filesystem::create_directories(path.parent_path());
  SF_INFO info{};
  info.samplerate = rate;
  info.channels = channels;
  info.format = format;
  SNDFILE* file = sf_open(path.c_str(), SFM_WRITE, &info);
  if (!file) throw std::runtime_error("cannot write " + path.string());
  const auto frames = static_cast<sf_count_t>(samples.size()) / channels;
  const bool written = sf_writef_float(file, samples.data(), frames) == frames;
  if (sf_close(file) != 0 || !written) throw std::runtime_error("cannot write " + path.string());
}

inline std::vector<float> tone(double hz, double seconds, int rate = 8000) {
  std::vector<float> samples;
  for (int i = 0; i < static_cast<int>(seconds * rate); ++i)
    samples.push_back(0.5F * static_cast<float>(std::sin(2 * M_PI * hz * i / rate)));
  return samples;
}

/// Returns synthetic speech: each letter from a to z is a different tone, a space is silence, each 0.1 s long.
inline std::vector<float> spoken(const std::string& text, int rate = 8000) {
  std::vector<float> samples = tone(0, 0.05, rate);
  for (const char c : text) {
    const std::vector<float> letter = c == ' ' ? tone(0, 0.1, rate) : tone(300 + 110.0 * (c - 'a'), 0.1, rate);
    samples.insert(samples.end(), letter.begin(), letter.end());
    samples.insert(samples.end(), static_cast<std::size_t>(rate / 50), 0.0F);
  }
  samples.insert(samples.end(), static_cast<std::size_t>(rate / 10), 0.0F);
  return samples;
}

}  // namespace ddpkit::testing
