#include "optim/shard_memory.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/backend.h"
#include "comm/symmetric_memory.h"
#include "tensor/flat_layout.h"

namespace ddpkit::optim {
namespace {

/// Memory for state, in tensors of one element per element of the pieces: the kinds of state and their saved blocks,
/// twice while the optimizer moves them, and the arena's rounding.
constexpr std::size_t kStateFactor = std::tuple_size_v<Algorithm::StateTensors> * 2 * 2 * 5 / 4;
constexpr std::size_t kStateReserve = std::size_t{16} << 20;

std::size_t aligned(std::size_t bytes) {
  return static_cast<std::size_t>(aligned_numel(static_cast<std::int64_t>(bytes), 1));
}

/// Returns the memory for the saved blocks of a tensor from zeros(): the second half of its storage.
at::Tensor saved_of(const at::Tensor& tensor) {
  const auto half = static_cast<std::int64_t>(tensor.storage().nbytes() / tensor.element_size() / 2);
  return tensor.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset() + half);
}

}  // namespace

bool ShardMemory::possible(const ProcessGroup& group) {
  const auto backend = Backend::of(group);
  return backend->is_elastic() && backend->symmetric_memory() != nullptr;
}

ShardMemory::ShardMemory(const ProcessGroup& group, const std::vector<std::int64_t>& numels, std::size_t weight_bytes,
                         std::size_t state_bytes)
    : rank_(group.rank()), places_offset_(aligned(sizeof(Header))) {
  std::size_t blocks = 0;
  for (const std::int64_t numel : numels) {
    first_block_.push_back(blocks);
    blocks += blocks_of(static_cast<std::size_t>(numel));
  }
  log_offset_ = places_offset_ + aligned(numels.size() * kKinds * sizeof(Place));
  weights_offset_ = log_offset_ + aligned(blocks * sizeof(std::atomic<std::uint64_t>));
  SymmetricMemory& memory = *Backend::of(group)->symmetric_memory();
  fixed_ = memory.allocate_segment(weights_offset_ + weight_bytes);
  state_ = memory.allocate_segment(state_bytes * kStateFactor + kStateReserve);
  arena_ = std::make_shared<shm::Arena>(state_, rank_, /*reserve=*/0);
}

void ShardMemory::set_pieces(const std::vector<at::Tensor>& pieces) {
  for (std::size_t i = 0; i < pieces.size(); ++i) index_of_[pieces[i].unsafeGetTensorImpl()] = i;
}

ShardMemory::Place& ShardMemory::place_of(int rank, std::size_t param, std::size_t kind) const {
  auto* const places = fixed_->base[static_cast<std::size_t>(rank)] + places_offset_;
  return reinterpret_cast<Place*>(places)[param * kKinds + kind];
}

std::atomic<std::uint64_t>* ShardMemory::log_of(int rank, std::size_t param) const {
  auto* const log = fixed_->base[static_cast<std::size_t>(rank)] + log_offset_;
  return reinterpret_cast<std::atomic<std::uint64_t>*>(log) + first_block_[param];
}

at::Tensor ShardMemory::zeros(std::int64_t numel, at::ScalarType dtype) {
  const std::size_t bytes = static_cast<std::size_t>(numel) * c10::elementSize(dtype);
  void* const data = arena_->allocate(2 * bytes);
  if (!data)
    throw Error(fmt::format("no memory for {} bytes of optimizer state that the other ranks can read", 2 * bytes));
  std::memset(data, 0, bytes);
  const auto whole = at::from_blob(
      data, {2 * numel}, [arena = arena_](void* block) { arena->free(block); }, at::dtype(dtype));
  return whole.narrow(0, 0, numel);
}

void ShardMemory::place(const at::Tensor& piece, const Algorithm::StateTensors& tensors) noexcept {
  const std::size_t param = index_of_.at(piece.unsafeGetTensorImpl());
  const std::byte* const base = state_->base[static_cast<std::size_t>(rank_)];
  for (std::size_t k = 0; k < kKinds; ++k) {
    Place place;
    if (tensors[k].defined()) {
      place.state = static_cast<std::uint64_t>(static_cast<const std::byte*>(tensors[k].const_data_ptr()) - base);
      place.saved = place.state + tensors[k].storage().nbytes() / 2;
    }
    place_of(rank_, param, k) = place;
  }
}

Algorithm::UndoLog ShardMemory::undo_log(const at::Tensor& piece, const Algorithm::StateTensors& tensors) {
  Algorithm::UndoLog log{
      .saved = {}, .updates = log_of(rank_, index_of_.at(piece.unsafeGetTensorImpl())), .update = update_};
  for (std::size_t k = 0; k < kKinds; ++k) {
    if (tensors[k].defined()) log.saved[k] = saved_of(tensors[k]);
  }
  return log;
}

std::byte* ShardMemory::state(int rank, std::size_t param, std::size_t kind) const {
  const std::uint64_t offset = place_of(rank, param, kind).state;
  if (offset == 0 || header(rank).replacements.load() != header(rank_).replacements.load())
    throw Error("a rank was lost while the state of its sharded optimizer was loaded, so its part is incomplete",
                {.rank = rank, .call = "regroup"});
  return state_->base[static_cast<std::size_t>(rank)] + offset;
}

void ShardMemory::copy_state(int rank, std::size_t param, std::size_t kind, std::int64_t begin, std::int64_t count,
                             std::size_t element_size, std::byte* to) const {
  const std::byte* const now = state(rank, param, kind);
  const std::byte* const saved = state_->base[static_cast<std::size_t>(rank)] + place_of(rank, param, kind).saved;
  const std::atomic<std::uint64_t>* const updates = log_of(rank, param);
  auto next = static_cast<std::size_t>(begin);
  for (const std::size_t end = next + static_cast<std::size_t>(count); next < end;) {
    const std::size_t block = next / kBlockElements;
    const std::size_t some = std::min(end, (block + 1) * kBlockElements) - next;
    const std::byte* const from = updates[block].load() == update_ ? saved : now;
    std::memcpy(to, from + next * element_size, some * element_size);
    to += some * element_size;
    next += some;
  }
}

}  // namespace ddpkit::optim
