#include <ddpkit/train/metrics.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/resource.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <sstream>
#include <string>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

namespace ddpkit::train {

IndexRange evaluation_share(std::int64_t size, int rank, int world_size) {
  const std::int64_t each = size / world_size;
  const std::int64_t extra = size % world_size;  // The first `extra` ranks receive one more sample.
  const std::int64_t begin = rank * each + std::min<std::int64_t>(rank, extra);
  return {.begin = begin, .end = begin + each + (rank < extra ? 1 : 0)};
}

std::vector<double> sum_over_ranks(const std::vector<double>& values, const ProcessGroup& group) {
  const at::Tensor sums = at::tensor(values, at::kDouble).to(group.device());
  group.all_reduce(sums);
  const at::Tensor host = sums.cpu();
  group.check();
  return {host.const_data_ptr<double>(), host.const_data_ptr<double>() + host.numel()};
}

std::vector<std::int64_t> peak_memory_of_ranks(const ProcessGroup& group) {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  std::vector<std::int64_t> bytes;
  for (const std::string& rank : group.all_gather_bytes(std::to_string(std::int64_t{usage.ru_maxrss} * 1024)))
    bytes.push_back(std::stoll(rank));
  return bytes;
}

std::vector<std::int64_t> peak_memory_of_devices(const std::vector<c10::Device>& devices, const ProcessGroup& group) {
  std::string mine;
  for (const c10::Device& device : devices) {
    if (device.is_cpu()) continue;
    const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    mine += fmt::format("{} ", stats.allocated_bytes[kAll].peak);
  }
  std::vector<std::int64_t> bytes;
  for (const std::string& rank : group.all_gather_bytes(mine)) {
    std::istringstream words(rank);
    for (std::int64_t word = 0; words >> word;) bytes.push_back(word);
  }
  return bytes;
}

void MeanLoss::add_sum(double sum, double samples) {
  sum_ += sum;
  samples_ += samples;
}

double MeanLoss::reduce(const ProcessGroup& group) const {
  const std::vector<double> sums = sum_over_ranks({sum_, samples_}, group);
  return sums[0] / sums[1];
}

std::string MeanLoss::note() const { return fmt::format("loss={:.4f}", sum_ / samples_); }

void MeanLoss::save(torch::serialize::OutputArchive& archive) const {
  archive.write("sums", at::tensor({sum_, samples_}, at::kDouble), /*is_buffer=*/true);
}

void MeanLoss::load(torch::serialize::InputArchive& archive) {
  at::Tensor sums;
  archive.read("sums", sums, /*is_buffer=*/true);
  sum_ = sums[0].item<double>();
  samples_ = sums[1].item<double>();
}

/// Sums of one device.
struct ClassificationMetrics::Sums {
  at::Tensor confusion;  ///< [classes * classes] int64, index target * classes + predicted.
  at::Tensor loss;       ///< Sum over the samples, and number of samples: [2] float64.
};

ClassificationMetrics::ClassificationMetrics(std::int64_t classes)
    : classes_(classes), mutex_(std::make_unique<std::mutex>()) {}
ClassificationMetrics::~ClassificationMetrics() = default;
ClassificationMetrics::ClassificationMetrics(ClassificationMetrics&&) noexcept = default;
ClassificationMetrics& ClassificationMetrics::operator=(ClassificationMetrics&&) noexcept = default;

ClassificationMetrics::Sums& ClassificationMetrics::sums_on(c10::Device device) {
  for (const auto& [there, sums] : sums_) {
    if (there == device) return *sums;
  }
  const auto options = at::TensorOptions().device(device);
  sums_.emplace_back(
      device, std::make_unique<Sums>(Sums{.confusion = at::zeros({classes_ * classes_}, options.dtype(at::kLong)),
                                          .loss = at::zeros({2}, options.dtype(at::kDouble))}));
  return *sums_.back().second;
}

void ClassificationMetrics::add(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& mean_loss) {
  add_predictions(logits, targets);
  add_loss(mean_loss, targets.size(0));
}

void ClassificationMetrics::add_predictions(const at::Tensor& logits, const at::Tensor& targets) {
  if (logits.dim() != 2 || logits.size(1) != classes_ || targets.dim() != 1 || targets.size(0) != logits.size(0))
    throw InvalidArgument(
        fmt::format("metrics of {} classes: logits are [{}] and targets [{}], not [batch, {}] and [batch]", classes_,
                    fmt::join(logits.sizes(), ", "), fmt::join(targets.sizes(), ", "), classes_));
  const at::NoGradGuard no_grad;
  const at::Tensor cells = targets * classes_ + logits.argmax(1);
  const at::Tensor ones = at::ones_like(cells);
  const std::lock_guard lock(*mutex_);
  sums_on(cells.device()).confusion.index_add_(0, cells, ones);
}

void ClassificationMetrics::add_loss(const at::Tensor& mean_loss, std::int64_t samples) {
  const at::NoGradGuard no_grad;
  const at::Tensor loss = mean_loss.detach();
  const std::lock_guard lock(*mutex_);
  const Sums& sums = sums_on(loss.device());
  sums.loss[0].add_(loss, samples);
  sums.loss[1].add_(samples);
}

at::Tensor ClassificationMetrics::all_sums() const {
  // double counts are exact up to 2^53 and share one all-reduce with the loss.
  const at::Tensor all = at::zeros({classes_ * classes_ + 2}, at::kDouble);
  const std::lock_guard lock(*mutex_);
  for (const auto& [device, sums] : sums_) {
    all.narrow(0, 0, classes_ * classes_).add_(sums->confusion.to(at::kCPU, at::kDouble));
    all.narrow(0, classes_ * classes_, 2).add_(sums->loss.cpu());
  }
  return all;
}

void ClassificationMetrics::save(torch::serialize::OutputArchive& archive) const {
  archive.write("sums", all_sums(), /*is_buffer=*/true);
}

void ClassificationMetrics::load(torch::serialize::InputArchive& archive) {
  at::Tensor all;
  archive.read("sums", all, /*is_buffer=*/true);
  if (all.numel() != classes_ * classes_ + 2)
    throw InvalidArgument(fmt::format("the saved metrics are not of {} classes", classes_));
  const std::lock_guard lock(*mutex_);
  sums_.clear();
  const Sums& sums = sums_on(at::kCPU);
  sums.confusion.copy_(all.narrow(0, 0, classes_ * classes_));
  sums.loss.copy_(all.narrow(0, classes_ * classes_, 2));
}

ClassificationResult ClassificationMetrics::reduce(const ProcessGroup& group) const {
  const at::Tensor moved = all_sums().to(group.device());
  group.all_reduce(moved);
  const at::Tensor host = moved.cpu();
  group.check();
  const double* values = host.const_data_ptr<double>();
  ClassificationResult result;
  double correct = 0, predicted = 0;
  for (std::int64_t target = 0; target < classes_; ++target) {
    auto& row = result.confusion.emplace_back(values + target * classes_, values + (target + 1) * classes_);
    correct += static_cast<double>(row[static_cast<std::size_t>(target)]);
    for (const std::int64_t count : row) predicted += static_cast<double>(count);
  }
  const double* loss = values + classes_ * classes_;
  result.loss = loss[0] / loss[1];
  result.accuracy = correct / predicted;
  result.samples = static_cast<std::int64_t>(predicted);
  return result;
}

std::vector<double> ClassificationResult::f1() const {
  std::vector<double> result;
  for (std::size_t k = 0; k < confusion.size(); ++k) {
    std::int64_t of_class = 0, taken_for = 0;
    for (std::size_t other = 0; other < confusion.size(); ++other) {
      of_class += confusion[k][other];
      taken_for += confusion[other][k];
    }
    // 2 TP / (2 TP + FN + FP)
    const auto both = static_cast<double>(of_class + taken_for);
    result.push_back(both > 0 ? 2 * static_cast<double>(confusion[k][k]) / both : 0);
  }
  return result;
}

double ClassificationResult::macro_f1() const {
  const std::vector<double> each = f1();
  double sum = 0;
  int classes = 0;
  for (std::size_t k = 0; k < confusion.size(); ++k) {
    bool appears = false;
    for (std::size_t other = 0; other < confusion.size(); ++other)
      appears = appears || confusion[k][other] > 0 || confusion[other][k] > 0;
    if (!appears) continue;
    sum += each[k];
    ++classes;
  }
  return sum / classes;
}

std::string ClassificationMetrics::note() const {
  const at::Tensor all = all_sums();
  const double* values = all.const_data_ptr<double>();
  double correct = 0, predicted = 0;
  for (std::int64_t cell = 0; cell < classes_ * classes_; ++cell) {
    predicted += values[cell];
    if (cell % (classes_ + 1) == 0) correct += values[cell];
  }
  const double* loss = values + classes_ * classes_;
  return fmt::format("loss={:.4f}, acc={:.2f}%", loss[0] / loss[1], 100 * correct / predicted);
}

std::string ClassificationResult::line() const {
  return fmt::format("Loss: {:.4f}, Acc: {:.2f}%", loss, 100 * accuracy);
}

}  // namespace ddpkit::train
