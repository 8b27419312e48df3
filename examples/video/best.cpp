#include "video/best.h"

#include <ATen/ATen.h>
#include <torch/serialize/archive.h>

namespace video {

bool Best::update(std::int64_t epoch, const ddpkit::train::ClassificationResult& result) {
  if (epoch_ > 0 && !(result.macro_f1() > result_.macro_f1())) return false;
  epoch_ = epoch;
  result_ = result;
  return true;
}

void Best::save(torch::serialize::OutputArchive& archive) const {
  std::vector<std::int64_t> counts;
  for (const auto& row : result_.confusion) counts.insert(counts.end(), row.begin(), row.end());
  archive.write("epoch", at::tensor({epoch_}, at::kLong), /*is_buffer=*/true);
  archive.write("scores", at::tensor({result_.loss, result_.accuracy}, at::kDouble), /*is_buffer=*/true);
  archive.write("confusion", at::tensor(counts, at::kLong), /*is_buffer=*/true);
}

void Best::load(torch::serialize::InputArchive& archive) {
  at::Tensor epoch, scores, confusion;
  archive.read("epoch", epoch, /*is_buffer=*/true);
  archive.read("scores", scores, /*is_buffer=*/true);
  archive.read("confusion", confusion, /*is_buffer=*/true);
  epoch_ = epoch.item<std::int64_t>();
  const double* values = scores.const_data_ptr<double>();
  const auto* counts = confusion.const_data_ptr<std::int64_t>();
  result_ = {.loss = values[0], .accuracy = values[1]};
  std::int64_t classes = 0;
  while (classes * classes < confusion.numel()) ++classes;
  for (std::int64_t k = 0; k < classes; ++k) {
    result_.confusion.emplace_back(counts + k * classes, counts + (k + 1) * classes);
    for (const std::int64_t count : result_.confusion.back()) result_.samples += count;
  }
}

}  // namespace video
