#include "asr/audio.h"

#include <samplerate.h>
#include <sndfile.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <utility>

#include <fmt/format.h>

namespace asr {
namespace {

struct Close {
  void operator()(SNDFILE* file) const { sf_close(file); }
};
using File = std::unique_ptr<SNDFILE, Close>;

std::uint32_t little_endian(const char* bytes) {
  std::uint32_t value = 0;
  for (int i = 3; i >= 0; --i) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

// libsndfile reads a truncated WAV without an error.
void check_wav_is_whole(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  char header[12];
  if (!file.read(header, 12) || std::memcmp(header, "RIFF", 4) != 0 || std::memcmp(header + 8, "WAVE", 4) != 0) return;
  const auto size = static_cast<std::uint64_t>(std::filesystem::file_size(path));
  constexpr std::uint32_t kUnknown = 0xffffffff;  // Programs that stream to a pipe write this length.
  for (std::uint64_t at = 12; at + 8 <= size;) {
    char chunk[8];
    file.seekg(static_cast<std::streamoff>(at));
    if (!file.read(chunk, 8)) return;
    const std::uint32_t length = little_endian(chunk + 4);
    if (std::memcmp(chunk, "data", 4) == 0) {
      if (length != kUnknown && at + 8 + length > size)
        throw AudioError(fmt::format("{}: truncated: it holds {} of the {} bytes of sound that its header announces",
                                     path.string(), size - at - 8, length));
      return;
    }
    at += 8 + std::uint64_t{length} + length % 2;
  }
}

File open(const std::filesystem::path& path, SF_INFO& info) {
  if (!std::filesystem::exists(path)) throw AudioError(fmt::format("{}: there is no such file", path.string()));
  File file(sf_open(path.c_str(), SFM_READ, &info));
  if (!file) {
    std::string why = sf_strerror(nullptr);
    while (!why.empty() && (why.back() == '.' || why.back() == '\n')) why.pop_back();
    throw AudioError(fmt::format("{}: no recording that can be read: {}", path.string(), why));
  }
  check_wav_is_whole(path);
  if (info.frames <= 0 || info.channels <= 0 || info.samplerate <= 0)
    throw AudioError(fmt::format("{}: an empty recording", path.string()));
  if (info.frames == SF_COUNT_MAX)
    throw AudioError(fmt::format("{}: its header has no length: write it again as a complete file", path.string()));
  constexpr sf_count_t kMost = sf_count_t{1} << 40;  // Two years at 16 kHz.
  if (info.frames > kMost)
    throw AudioError(
        fmt::format("{}: its header announces {} samples: no recording is so long", path.string(), info.frames));
  return file;
}

std::vector<float> resampled(const std::vector<float>& input, int from, int to, const std::filesystem::path& path) {
  const double ratio = static_cast<double>(to) / from;
  std::vector<float> output(static_cast<std::size_t>(std::ceil(static_cast<double>(input.size()) * ratio)) + 16);
  SRC_DATA data{};
  data.data_in = input.data();
  data.data_out = output.data();
  data.input_frames = static_cast<long>(input.size());
  data.output_frames = static_cast<long>(output.size());
  data.src_ratio = ratio;
  if (const int error = src_simple(&data, SRC_SINC_MEDIUM_QUALITY, 1))
    throw AudioError(
        fmt::format("{}: cannot be resampled from {} to {} Hz: {}", path.string(), from, to, src_strerror(error)));
  output.resize(static_cast<std::size_t>(data.output_frames_gen));
  return output;
}

// Returns the first sample and the number of samples.
std::pair<sf_count_t, sf_count_t> place_of(const Segment& segment, const SF_INFO& info,
                                           const std::filesystem::path& path) {
  constexpr double kRounding = 0.05;
  const double length = static_cast<double>(info.frames) / info.samplerate;
  const auto begin = static_cast<sf_count_t>(std::llround(segment.offset * info.samplerate));
  if (begin >= info.frames || segment.offset + segment.duration > length + kRounding)
    throw AudioError(fmt::format("{}: offset {} s and duration {} s reach beyond its {:.3f} s", path.string(),
                                 segment.offset, segment.duration, length));
  const sf_count_t left = info.frames - begin;
  if (segment.duration == 0) return {begin, left};
  const auto wanted = static_cast<sf_count_t>(std::llround(segment.duration * info.samplerate));
  return {begin, std::clamp<sf_count_t>(wanted, 1, left)};
}

}  // namespace

AudioInfo audio_info(const std::filesystem::path& path, const Segment& segment) {
  SF_INFO info{};
  const File file = open(path, info);
  return {.samples = place_of(segment, info, path).second, .sample_rate = info.samplerate};
}

std::vector<float> read_audio(const std::filesystem::path& path, int sample_rate, const Segment& segment) {
  SF_INFO info{};
  const File file = open(path, info);
  const auto channels = static_cast<std::size_t>(info.channels);
  const auto [begin, count] = place_of(segment, info, path);
  const auto samples = static_cast<std::size_t>(count);
  if (begin > 0 && sf_seek(file.get(), begin, SEEK_SET) != begin)
    throw AudioError(fmt::format("{}: its sample {} cannot be reached", path.string(), begin));
  // Reads in blocks: a header may announce far more than the file has.
  constexpr std::size_t kBlock = 1 << 16;
  std::vector<float> mono, block(kBlock * channels);
  while (mono.size() < samples) {
    const std::size_t wanted = std::min(kBlock, samples - mono.size());
    const sf_count_t got = sf_readf_float(file.get(), block.data(), static_cast<sf_count_t>(wanted));
    if (got <= 0) break;
    for (std::size_t i = 0; i < static_cast<std::size_t>(got); ++i) {
      float sum = 0;
      for (std::size_t channel = 0; channel < channels; ++channel) sum += block[i * channels + channel];
      mono.push_back(sum / static_cast<float>(channels));
      if (!std::isfinite(mono.back()))
        throw AudioError(fmt::format("{}: sample {} is {}", path.string(), mono.size() - 1, mono.back()));
    }
  }
  if (mono.size() < samples)
    throw AudioError(fmt::format("{}: truncated: it holds {} of the {} samples that its header announces",
                                 path.string(), mono.size(), samples));
  return info.samplerate == sample_rate ? mono : resampled(mono, info.samplerate, sample_rate, path);
}

}  // namespace asr
