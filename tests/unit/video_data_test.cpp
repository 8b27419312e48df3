// Trials, their split, the loader and its cache.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <thread>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/train/random.h>

#include "video/balance.h"
#include "video/behaviour.h"
#include "video/check.h"
#include "video/clip_loader.h"
#include "video/generate.h"
#include "video/trials.h"
#include "video_files.h"

using namespace video;
using namespace video::testing;

TEST_CASE("a summary lists as many bad trials as it is asked for", "[video]") {
  DataFaults faults("trials.csv", OnBadData::kSkip);
  CHECK(faults.summary(0).empty());
  faults.add(3, "x");
  CHECK(faults.summary(0) == "1 bad trial skipped");
  faults.add(4, "y");
  faults.note(5, "z");
  CHECK(faults.summary(0) == "2 bad trials skipped\n1 note");
  CHECK(faults.summary(1) == "2 bad trials skipped:\n  trials.csv:3: x\n  and 1 more\n1 note:\n  trials.csv:5: z");
}

TEST_CASE("a trial that cannot be used is named with file and line", "[video]") {
  const Folder folder;
  const std::string good = "v.mp4,0,16,rest\n";
  const auto read = [&](const std::string& csv, OnBadData policy, std::vector<std::string> classes = {"rest", "walk"}) {
    write_file(folder / "trials.csv", csv);
    DataFaults faults(trials_file(folder.path()), policy);
    const TrialSet set = read_trials(folder.path(), std::move(classes), 17, faults);
    return std::pair(set, faults.summary());
  };
  const std::string header = "video,start_frame,end_frame,label\n";
  for (const auto& [line, message] : std::vector<std::pair<std::string, std::string>>{
           {"v.mp4,0,16,fly", "unknown label 'fly': the classes are rest, walk"},
           {"v.mp4,zero,16,rest", "start_frame 'zero' is no whole number"},
           {"v.mp4,0,99999999999999999999,rest", "end_frame '99999999999999999999' is no whole number"},
           {"v.mp4,20,10,rest", "there are no frames 20 to 10"},
           {"v.mp4,-3,20,rest", "there are no frames -3 to 20"},
           {"v.mp4,0,15,rest", "frames 0 to 15 are 16, fewer than a clip's 17"},
           {"v.mp4,0,16", "has 3 fields, and the header 4"},
           {",0,16,rest", "names no video"},
           {"v.mp4,0,16,", "has no label"}}) {
    CAPTURE(line);
    const std::string csv = header + good + line + "\n" + good;
    CHECK_THROWS_WITH(read(csv, OnBadData::kStop),
                      ContainsSubstring((folder / "trials.csv").string() + ":3: ") && ContainsSubstring(message));
    const auto [set, summary] = read(csv, OnBadData::kSkip);
    CHECK(set.trials.size() == 2);
    CHECK_THAT(summary, ContainsSubstring("1 bad trial skipped") && ContainsSubstring("trials.csv:3: ") &&
                            ContainsSubstring(message));
  }
  for (const OnBadData policy : {OnBadData::kStop, OnBadData::kSkip}) {
    CHECK_THROWS_WITH(read(good + good, policy), ContainsSubstring("trials.csv:1: the first line must name"));
    CHECK_THROWS_WITH(read("video,start_frame,label\n" + good, policy), ContainsSubstring("no end_frame"));
    CHECK_THROWS_WITH(read("video,label,start_frame,end_frame,label\n", policy),
                      ContainsSubstring("more than one label"));
    CHECK_THROWS_WITH(read("", policy), ContainsSubstring("is empty"));
    CHECK_THROWS_WITH(read(header, policy), ContainsSubstring("holds no trial to use"));
  }
  // Any row order, additional columns, classes in any order.
  const auto [set, summary] =
      read("label,note,end_frame,video,start_frame\nwalk,x,30,\"a,b.mp4\",4\nfly,,20,c.mp4,0\n", OnBadData::kStop, {});
  CHECK(summary.empty());
  CHECK(set.class_names == std::vector<std::string>{"fly", "walk"});
  CHECK(set.trials[0].video == "a,b.mp4");
  CHECK(set.trials[0].first == 4);
  CHECK(set.trials[0].last == 30);
  CHECK(set.trials[0].label == 1);
  write_file(folder / "classes.txt", "walk\nfly\n");
  CHECK(read("video,start_frame,end_frame,label\nv,0,16,walk\n", OnBadData::kStop, {}).first.trials[0].label == 0);
  CHECK_THROWS_WITH(read(header + good, OnBadData::kStop, {}), ContainsSubstring("unknown label 'rest'"));
}

TEST_CASE("the split is by video, and each class is in both parts", "[video]") {
  TrialSet set{.folder = "", .class_names = {"common", "rare", "single"}, .trials = {}};
  for (int i = 0; i < 300; ++i)
    set.trials.push_back(
        {.line = 0, .video = fmt::format("{}", i % 30), .first = 0, .last = 16, .label = i % 100 < 3 ? 1 : 0});
  set.trials[0].label = 2;
  for (const std::uint64_t seed : {0, 1, 2}) {
    const TrialSplit split = split_by_video(set, 0.2, seed);
    CHECK(split.train.size() + split.validation.size() == 300);
    std::set<std::string> train, both;
    std::vector<int> counts(3);
    for (const std::size_t i : split.train) train.insert(set.trials[i].video);
    for (const std::size_t i : split.validation) {
      if (train.contains(set.trials[i].video)) both.insert(set.trials[i].video);
      ++counts[static_cast<std::size_t>(set.trials[i].label)];
    }
    CHECK(both.empty());
    CHECK(train.size() == 24);
    CHECK(counts[1] > 0);
    CHECK(counts[1] < 8);
    CHECK(split_by_video(set, 0.2, seed).validation == split.validation);
  }
  CHECK(split_by_video(set, 0.2, 0).validation != split_by_video(set, 0.2, 1).validation);
  for (Trial& trial : set.trials) trial.video = "one";
  CHECK_THROWS_WITH(split_by_video(set, 0.2, 0), ContainsSubstring("of 1 video"));
}

TEST_CASE("class weights turn the frequencies round, and the sampler draws by them", "[video]") {
  TrialSet set{.folder = "", .class_names = {"common", "rare", "none"}, .trials = {}};
  std::vector<std::size_t> all(100);
  std::iota(all.begin(), all.end(), 0);
  for (int i = 0; i < 100; ++i)
    set.trials.push_back({.line = 0, .video = "v", .first = 0, .last = 16, .label = i < 90 ? 0 : 1});
  const std::vector<double> weights = weights_of_classes(set, all, Balance::kLoss);
  CHECK(weights[0] == Approx(100.0 / 180));
  CHECK(weights[1] == Approx(5));
  CHECK(weights[2] == 0);
  CHECK(weights_of_classes(set, all, Balance::kNone) == std::vector<double>{1, 1, 1});
}

TEST_CASE("a clip begins anywhere in its trial, in the middle by default", "[video]") {
  const Trial trial{.line = 2, .video = "v", .first = 10, .last = 30};  // 21 frames: five places for 17.
  std::vector<std::int64_t> starts;
  for (const double draw : {0.0, 0.199, 0.21, 0.5, 0.999, 1.0}) starts.push_back(clip_start(trial, 17, draw));
  CHECK(starts == std::vector<std::int64_t>{10, 10, 11, 12, 14, 14});
  CHECK(clip_start({.line = 2, .video = "v", .first = 3, .last = 19}, 17, 0.99) == 3);
}

TEST_CASE("threads load the right clips, with and without a cache", "[video]") {
  const Folder folder;
  const FrameSize size{32, 32};
  for (const char* name : {"a.mp4", "b.mp4", "c.mp4"}) write_numbered(folder / name, 100, {.size = size});
  for (const bool cached : {false, true}) {
    ClipLoader loader(folder.path(), {.size = size,
                                      .frames = 5,
                                      .open_videos = 2,
                                      .cache_dir = cached ? folder / "cache" : std::filesystem::path(),
                                      .cache_bytes = 1 << 20});
    std::atomic<int> wrong = 0;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        ddpkit::train::Random random(static_cast<std::uint64_t>(thread));
        std::vector<std::uint8_t> pixels(static_cast<std::size_t>(loader.clip_bytes()));
        for (int i = 0; i < 40; ++i) {
          const std::int64_t first = random.below(96);
          loader.load(std::array{"a.mp4", "b.mp4", "c.mp4"}[static_cast<std::size_t>(random.below(3))], first,
                      pixels.data());
          for (int frame = 0; frame < 5; ++frame)
            wrong += number_in(pixels.data() + frame * 1024, size) != first + frame;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    if (cached) CHECK(loader.cache()->hits() > 0);
  }
}

TEST_CASE("a cached clip is used only undamaged, for the same file, and within the bound", "[video]") {
  const Folder folder;
  const FrameSize size{32, 32};
  write_numbered(folder / "a.mp4", 60, {.size = size});
  const auto make = [&](std::int64_t bytes) {
    return ClipLoader(folder.path(), {.size = size, .frames = 3, .cache_dir = folder / "cache", .cache_bytes = bytes});
  };
  const auto number = [&](ClipLoader& loader, std::int64_t first) {
    std::vector<std::uint8_t> pixels(static_cast<std::size_t>(loader.clip_bytes()));
    loader.load("a.mp4", first, pixels.data());
    return number_in(pixels.data(), size);
  };
  const auto files = [&] { return ddpkit::testing::names_in(folder / "cache"); };
  {
    ClipLoader loader = make(1 << 20);
    CHECK(number(loader, 7) == 7);
    CHECK(loader.cache()->hits() == 0);
    CHECK(number(loader, 7) == 7);
    CHECK(loader.cache()->hits() == 1);
    REQUIRE(files().size() == 1);
  }
  const auto file = folder / "cache" / files()[0];
  const std::string whole = read_file(file);
  for (const std::size_t size_left : {whole.size(), whole.size() - 1, std::size_t{5}, std::size_t{0}}) {
    std::string bytes = whole.substr(0, size_left);
    if (size_left == whole.size()) bytes[whole.size() - 100] ^= 64;
    write_file(file, bytes);
    ClipLoader loader = make(1 << 20);
    CHECK(number(loader, 7) == 7);
    CHECK(loader.cache()->damaged() == 1);
    CHECK(read_file(file) == whole);
  }
  {  // Another video under the same name.
    std::filesystem::last_write_time(folder / "a.mp4",
                                     std::filesystem::file_time_type::clock::now() + std::chrono::hours(1));
    ClipLoader loader = make(1 << 20);
    CHECK(number(loader, 7) == 7);
    CHECK(loader.cache()->hits() == 0);
    CHECK(files().size() == 2);
  }
  ClipLoader full = make(static_cast<std::int64_t>(3 * whole.size() + whole.size() / 2));
  for (std::int64_t first = 20; first < 30; ++first) CHECK(number(full, first) == first);
  CHECK(files().size() == 3);
}

TEST_CASE("the generated classes are as uneven as the study's", "[video]") {
  CHECK(trials_of_classes(980, 1) == std::vector<int>{529, 137, 108, 78, 59, 39, 20, 10});
  const std::vector<int> reduced = trials_of_classes(327, 8);
  CHECK(std::accumulate(reduced.begin(), reduced.end(), 0) == 327);
  CHECK(*std::min_element(reduced.begin(), reduced.end()) == 8);
  CHECK_THROWS_WITH(trials_of_classes(60, 8), ContainsSubstring("60 trials are too few"));
}

TEST_CASE("a single frame does not reveal the behaviour", "[video]") {
  // Each number of the pose has the same mean and variance in every class and frame.
  constexpr int kTrials = 4000;
  const auto moments = [&](Behaviour behaviour, int frame) {
    std::vector<double> sums(14);
    for (int i = 0; i < kTrials; ++i) {
      ddpkit::train::Random random(static_cast<std::uint64_t>(i) * 8 + static_cast<std::uint64_t>(behaviour));
      const Pose pose = Motion(behaviour, 17, random).at(frame);
      const double values[] = {pose.x,    pose.y,          std::cos(pose.heading), pose.stretch,
                               pose.head, pose.front_paws, pose.hind_paw};
      for (std::size_t k = 0; k < 7; ++k) {
        sums[2 * k] += values[k] / kTrials;
        sums[2 * k + 1] += values[k] * values[k] / kTrials;
      }
    }
    return sums;
  };
  const auto rest = moments(Behaviour::kRest, 0);
  for (std::size_t behaviour = 0; behaviour < kBehaviours.size(); ++behaviour) {
    for (const int frame : {0, 8, 16}) {
      CAPTURE(kBehaviours[behaviour].name, frame);
      const auto found = moments(static_cast<Behaviour>(behaviour), frame);
      // Six standard errors of a value within -1 .. 1.5 whose standard deviation is below 0.75.
      for (std::size_t k = 0; k < rest.size(); ++k)
        CHECK(std::abs(found[k] - rest[k]) < 6 * 0.75 * std::sqrt(2.0 / kTrials));
    }
  }
}

TEST_CASE("the same seed generates the same files", "[video]") {
  const Folder folder;
  const GenerateOptions options{.videos = 3, .trials = 30, .least_of_class = 1, .size = {32, 32}, .threads = 2};
  generate(folder / "a", options);
  generate(folder / "b", options);
  GenerateOptions other = options;
  other.seed = 1;
  generate(folder / "c", other);
  for (const char* name : {"trials.csv", "classes.txt", "videos/000.mp4", "videos/002.mp4"})
    CHECK(read_file(folder / "a" / name) == read_file(folder / "b" / name));
  CHECK(read_file(folder / "a/videos/000.mp4") != read_file(folder / "c/videos/000.mp4"));
  CHECK_THROWS_WITH(generate(folder / "a", options), ContainsSubstring("is not an empty folder"));
  CHECK_FALSE(std::filesystem::exists(folder / "a.partial"));
  // Every trial is inside its video.
  DataFaults faults(trials_file(folder / "a"), OnBadData::kStop);
  const TrialSet set = read_trials(folder / "a", {}, 17, faults);
  CHECK(set.trials.size() == 30);
  CHECK(set.class_names.size() == kBehaviours.size());
  for (const Trial& trial : set.trials) CHECK(index_video(folder / "a" / trial.video)->frames() > trial.last);
}
