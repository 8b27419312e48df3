#include "parallel/sharding/shared_weights.h"

#include <malloc.h>
#include <unistd.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <sstream>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

#include "comm/backend.h"
#include "comm/shm/copy_on_write_view.h"
#include "comm/shm/mapping.h"
#include "comm/shm/operation.h"
#include "parallel/model_agreement.h"
#include "tensor/flat_layout.h"

namespace ddpkit::optim {
/// Lives as long as any tensor on these pages.
struct SharedWeights::Pages {
  shm::Mapping shared;
  std::unique_ptr<shm::CopyOnWriteView> view;
};

bool SharedWeights::possible(const ProcessGroup& group) {
  return group.world_size() > 1 && Backend::of(group)->symmetric_memory() != nullptr;
}

SharedWeights::SharedWeights(std::vector<NamedParameter> parameters, ProcessGroup group)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      pages_(std::make_shared<Pages>()),
      flag_(at::zeros({1}, at::kByte)) {
  const auto attempt = [&](const auto& action) { run_on_all_ranks(group_, "ShardedOptimizer", action); };
  attempt([&] { lay_out(); });
  check_same_on_all_ranks(group_, "shared_weights: which parameters are views of one tensor",
                          [&] { return fmt::format("{}", fmt::join(offsets_, " ")); });
  attempt([&] {
    if (group_.rank() == 0) pages_->shared = shm::Mapping::create("weights", bytes_);
  });
  const std::string where = group_.all_gather_bytes(fmt::format("{} {}", ::getpid(), pages_->shared.descriptor()))[0];
  attempt([&] {
    shm::RankProcessId owner{.rank = 0};
    int fd = 0;
    std::istringstream(where) >> owner.pid >> fd;
    if (group_.rank() != 0) pages_->shared = shm::Mapping::open(owner, fd, bytes_);
    pages_->view = std::make_unique<shm::CopyOnWriteView>(owner, fd, bytes_);
  });
  pages_->shared.close_descriptor();

  for (const auto& [storage, offset] : storages_) {
    const auto [begin, count] = shm::slice_of(storage.nbytes(), 1, group_.rank(), group_.world_size());
    std::copy_n(static_cast<const std::byte*>(storage.data()) + begin, count, pages_->shared.data() + offset + begin);
  }
  group_.barrier();
  for (const auto& [storage, offset] : std::exchange(storages_, {})) move(storage, offset);
// ThreadSanitizer replaces malloc. glibc's allocator is then not initialized, and initializing it is not thread-safe.
#if defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
  ::malloc_trim(0);  // Returns the weights' old memory to the operating system.
#endif
}

/// Computes the new offset of each parameter and of its base tensors.
void SharedWeights::lay_out() {
  std::map<const c10::StorageImpl*, std::pair<std::size_t, std::size_t>> places;  // Offset; bytes of no parameter.
  std::set<std::pair<const c10::StorageImpl*, std::size_t>> counted;
  for (const NamedParameter& parameter : parameters_) {
    const at::Storage& storage = parameter.tensor.storage();
    const auto [found, added] = places.try_emplace(storage.unsafeGetStorageImpl(), bytes_, storage.nbytes());
    if (added) {
      storages_.emplace_back(storage, bytes_);
      bytes_ += static_cast<std::size_t>(aligned_numel(static_cast<std::int64_t>(storage.nbytes()), 1));
    }
    const std::size_t offset =
        static_cast<std::size_t>(parameter.tensor.storage_offset()) * parameter.tensor.element_size();
    offsets_.push_back(found->second.first + offset);
    if (counted.emplace(found->first, offset).second) found->second.second -= parameter.tensor.nbytes();
  }
  bytes_ = std::max(bytes_, kAlignment);
  for (const NamedParameter& parameter : parameters_) {
    const auto& [offset, others] = places.at(parameter.tensor.storage().unsafeGetStorageImpl());
    if (others != 0)
      throw InvalidArgument(
          fmt::format("parameter {} is part of a tensor of {} bytes, {} of which belong to no parameter that the "
                      "ShardedOptimizer updates: set shared_weights to false, or give the parameter its own memory",
                      parameter.name, parameter.tensor.storage().nbytes(), others));
  }
}

/// Moves all tensors on `storage` to the pages.
void SharedWeights::move(const at::Storage& storage, std::size_t offset) const {
  auto pages = std::make_unique<std::shared_ptr<Pages>>(pages_);
  std::byte* data = pages_->view->data() + offset;
  const auto release = [](void* context) { delete static_cast<std::shared_ptr<Pages>*>(context); };
  storage.set_data_ptr(at::DataPtr(data, pages.release(), release, at::kCPU));
}

void SharedWeights::adopt(std::size_t index) {
  const at::Tensor& parameter = parameters_[index].tensor;
  if (parameter.storage().nbytes() != parameter.nbytes())
    throw InvalidArgument(
        fmt::format("parameter {} has become part of a tensor of {} bytes since the ShardedOptimizer was made: with "
                    "shared_weights its memory must be its own from then on",
                    parameters_[index].name, parameter.storage().nbytes()));
  std::memcpy(pages_->view->data() + offsets_[index], parameter.const_data_ptr(), parameter.nbytes());
  move(parameter.storage(), offsets_[index]);
}

at::Tensor SharedWeights::piece(std::size_t index, std::int64_t begin, std::int64_t count) const {
  const at::Tensor& parameter = parameters_[index].tensor;
  std::byte* data = pages_->shared.data() + offsets_[index] +
                    static_cast<std::size_t>(begin) * static_cast<std::size_t>(parameter.element_size());
  return at::from_blob(
      data, {count}, [pages = pages_](void*) {}, parameter.options().requires_grad(false));
}

bool SharedWeights::is_written() const noexcept { return pages_->view->is_written(); }

void SharedWeights::synchronize() {
  flag_.data_ptr<std::uint8_t>()[0] = is_written();
  group_.all_reduce(flag_, ReduceOp::kMax);
  if (flag_.const_data_ptr<std::uint8_t>()[0] == 0) return;

  const shm::CopyOnWriteView& view = *pages_->view;
  at::Tensor written = at::empty({static_cast<std::int64_t>(view.granules())}, at::kByte);
  for (std::size_t g = 0; g < view.granules(); ++g) written.data_ptr<std::uint8_t>()[g] = view.is_written(g);
  group_.all_reduce(written, ReduceOp::kMax);
  check_alike(written);
  absorb(written);
  group_.barrier();
  pages_->view->reset();
}

/// `written`: by any rank. [granule]
void SharedWeights::check_alike(const at::Tensor& written) const {
  const shm::CopyOnWriteView& view = *pages_->view;
  at::Tensor hashes = at::zeros({written.numel()}, at::kLong);
  const auto* is_written = written.const_data_ptr<std::uint8_t>();
  for (std::size_t g = 0; g < view.granules(); ++g) {
    const std::size_t begin = g * view.granule_bytes();
    if (is_written[g])
      hashes.data_ptr<std::int64_t>()[g] = static_cast<std::int64_t>(std::hash<std::string_view>()(
          {reinterpret_cast<const char*>(view.data() + begin), std::min(view.granule_bytes(), view.bytes() - begin)}));
  }
  const at::Tensor all = group_.all_gather(hashes);
  for (int r = 1; r < group_.world_size(); ++r) {
    for (std::size_t g = 0; g < view.granules(); ++g) {
      const auto* row = all.const_data_ptr<std::int64_t>();
      if (row[static_cast<std::size_t>(r) * view.granules() + g] == row[g]) continue;
      throw InvalidArgument(fmt::format(
          "{} has been written to outside the optimizer, and differs between rank 0 and rank {}: with shared weights, "
          "as "
          "with any data parallelism, all ranks must change parameters alike (broadcast what one rank makes)",
          names_in(g), r));
    }
  }
}

/// Writes the changed granules to the shared memory. Each rank writes a part of them.
void SharedWeights::absorb(const at::Tensor& written) {
  const shm::CopyOnWriteView& view = *pages_->view;
  const auto ranks = static_cast<std::size_t>(group_.world_size());
  for (auto g = static_cast<std::size_t>(group_.rank()); g < view.granules(); g += ranks) {
    const std::size_t begin = g * view.granule_bytes();
    if (written.const_data_ptr<std::uint8_t>()[g])
      std::memcpy(pages_->shared.data() + begin, view.data() + begin,
                  std::min(view.granule_bytes(), view.bytes() - begin));
  }
}

/// Returns "parameter a", or "one of the parameters a, b, c".
std::string SharedWeights::names_in(std::size_t granule) const {
  const std::size_t begin = granule * pages_->view->granule_bytes();
  const std::size_t end = begin + pages_->view->granule_bytes();
  std::vector<std::string> names;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (offsets_[i] < end && offsets_[i] + parameters_[i].tensor.nbytes() > begin) names.push_back(parameters_[i].name);
  }
  return names.size() == 1 ? "parameter " + names[0] : fmt::format("one of the parameters {}", fmt::join(names, ", "));
}

}  // namespace ddpkit::optim
