// metrics.csv, curves.svg, confusion.svg, and the texts of a run's first and last lines.
#include "train/history.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include <ddpkit/train/metrics.h>
#include <ddpkit/train/svg.h>

#include "support/catch.h"
#include "support/folder.h"
#include "train/console.h"

using namespace ddpkit::train;
using ddpkit::testing::Folder;
using ddpkit::testing::read_file;
using ddpkit::testing::write_file;

namespace {

std::int64_t count(const std::string& text, const std::string& words) {
  std::int64_t found = 0;
  for (std::size_t at = text.find(words); at != std::string::npos; at = text.find(words, at + 1)) ++found;
  return found;
}

}  // namespace

TEST_CASE("the table and the curves of a run hold all epochs, also those before it resumed", "[history]") {
  const Folder folder;
  {
    History history(folder.path());
    history.add(1, 10, {{"loss/train", 2.5}, {"training/lr", 0.1}, {"training/clips_per_second", 40}}, "epoch");
    history.add(2, 20, {{"loss/train", 1.5}, {"loss/test", 3}, {"training/lr", 0.05}}, "epoch");
    history.add(3, 30, {{"loss/train", NAN}, {"training/lr", 0.01}}, "epoch");
  }
  CHECK(read_file(folder / "metrics.csv") ==
        "epoch,step,loss/train,training/lr,training/clips_per_second,loss/test\n"
        "1,10,2.5,0.1,40,\n"
        "2,20,1.5,0.05,,3\n"
        "3,30,,0.01,,\n");
  History resumed(folder.path());
  resumed.load(20);  // The checkpoint is of the second epoch.
  resumed.add(3, 30, {{"loss/train", 0.5}, {"training/lr", 0.02}}, "epoch");
  CHECK(read_file(folder / "metrics.csv") ==
        "epoch,step,loss/train,training/lr,training/clips_per_second,loss/test\n"
        "1,10,2.5,0.1,40,\n"
        "2,20,1.5,0.05,,3\n"
        "3,30,0.5,0.02,,\n");
  const std::string curves = read_file(folder / "curves.svg");
  CHECK(curves.starts_with("<svg"));
  CHECK(curves.ends_with("</svg>\n"));
  CHECK(count(curves, ">loss by epoch<") == 1);
  CHECK(count(curves, ">learning rate by epoch<") == 1);
  CHECK(count(curves, "<polyline") == 3);  // Rates in other units have no curve.
  const std::size_t points = curves.find("points=\"") + 8;
  CHECK(std::count(curves.begin() + static_cast<std::ptrdiff_t>(points),
                   curves.begin() + static_cast<std::ptrdiff_t>(curves.find('"', points)), ',') == 3);
  CHECK(ddpkit::testing::names_in(folder.path()) == std::vector<std::string>{"curves.svg", "metrics.csv"});
}

TEST_CASE("an unreadable table starts again", "[history]") {
  const Folder folder;
  for (const char* text : {"", "epoch\n", "epoch,step,loss/train\n1,x,2\n", "epoch,step\n1,2,3\n"}) {
    CAPTURE(text);
    write_file(folder / "metrics.csv", text);
    History history(folder.path());
    history.load(100);
    history.add(1, 10, {{"loss/train", 2}}, "epoch");
    CHECK(read_file(folder / "metrics.csv") == "epoch,step,loss/train\n1,10,2\n");
  }
}

TEST_CASE("a chart of one point or of none is complete", "[history]") {
  for (const std::vector<double>& y : {std::vector<double>{}, {1.0}, {NAN}, {0.0, 0.0}}) {
    std::vector<double> x(y.size());
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<double>(i);
    const std::string text =
        svg::chart({.title = "a<b", .series = {{.name = "caf\xe9", .x = x, .y = y}}}, 0, 0, 300, 200);
    CHECK(count(text, ">a&lt;b<") == 1);
    CHECK(count(text, ">caf?<") == 1);  // XML must be UTF-8.
    CHECK(count(text, "nan") == 0);
    CHECK(count(text, "inf") == 0);
  }
  CHECK(svg::escaped("\xc3\xa9 \xe2\x9c\x93 \xf0\x9f\x98\x80 \xe2\x9c") == "\xc3\xa9 \xe2\x9c\x93 \xf0\x9f\x98\x80 ??");
}

TEST_CASE("a picture of a confusion matrix has all counts", "[history]") {
  const ClassificationResult result{.loss = 1, .accuracy = 0.75, .samples = 8, .confusion = {{5, 1}, {1, 1}}};
  const std::string text = confusion_svg(result, {"rest", "wa<lk"});
  CHECK(count(text, ">accuracy 75.0 %, macro F1 0.667<") == 1);
  CHECK(count(text, "<rect x=") == 4);
  CHECK(count(text, ">5<") == 1);
  CHECK(count(text, "fill-opacity=\"0.833\"") == 1);
  CHECK(count(text, ">wa&lt;lk 2<") == 1);
}

TEST_CASE("a progress bar shows the loss and accuracy of the samples so far", "[history]") {
  ClassificationMetrics metrics(2);
  metrics.add(at::tensor({1.0F, 0.0F, 0.0F, 1.0F}).view({2, 2}), at::tensor({0, 0}, at::kLong), at::scalar_tensor(0.5));
  metrics.add(at::tensor({1.0F, 0.0F}).view({1, 2}), at::tensor({0}, at::kLong), at::scalar_tensor(2.0));
  CHECK(metrics.note() == "loss=1.0000, acc=66.67%");
}

TEST_CASE("numbers of a run's first and last lines", "[history]") {
  CHECK(time_text(307.9) == "05:07");
  CHECK(time_text(3907) == "1:05:07");
  CHECK(memory_text(318'400'000) == "318 MB");
  CHECK(memory_text(5'040'000'000) == "5.0 GB");
  CHECK(count_text(999) == "999");
  CHECK(count_text(95'558) == "95.6k");
  CHECK(count_text(3'055'208) == "3.06M");
  CHECK(number_of(1, "epoch") == "1 epoch");
  CHECK(number_of(0, "update") == "0 updates");
  CHECK(device_word({c10::kCPU}) == std::string("rank"));
  CHECK(device_word({c10::kCPU, c10::kCPU}) == std::string("replica"));
  CHECK(device_word({{c10::kCUDA, 0}, {c10::kCUDA, 1}}) == std::string("GPU"));
  CHECK(memory_of_each({318'000'000, 316'000'000}, "GPU") == "GPU 0 318 MB, GPU 1 316 MB");
  const Folder folder;
  write_file(folder / "best.pt", "");
  write_file(folder / "curves.svg.tmp", "");
  write_file(folder / "logs/events", "");
  CHECK(files_of(folder.path()) == folder.path().string() + "/{best.pt, logs/}");
}
