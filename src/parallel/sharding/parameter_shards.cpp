#include "parallel/sharding/parameter_shards.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "parallel/sharding/gathered_use.h"
#include "parallel/sharding/unit_block.h"
#include "tensor/tensor_memory.h"

namespace ddpkit {
namespace {

/// Whatever the calling operation's mode is, the shards and gathered memory are ordinary tensors without history.
struct PlainTensors {
  c10::InferenceMode no_inference{false};
  at::NoGradGuard no_grad;
};

}  // namespace

class ParameterShards::Unit final : public GatheredMemory {
 public:
  using Block = UnitBlock;

  Unit(ParameterShards& shards, at::Device device) : users(device), shards_(shards) {}

  void acquire(const char* operation, bool writes) override {
    shards_.check_scope(*this, operation);
    // release() of the unit first closes the unit and then looks at the pins.
    ++pins;
    if (is_open && !shards_.moves_to(*this) && users.is_current()) {
      touched.store(++shards_.clock_, std::memory_order_relaxed);
    } else {
      try {
        shards_.use(*this);
      } catch (...) {
        --pins;
        throw;
      }
    }
    if (writes) is_written = true;
  }

  void release() noexcept override {
    --pins;
    if (shards_.whole_ > shards_.window_) shards_.trim();
  }

  std::string name;
  std::size_t index = 0;
  bool stays_whole = false;
  std::vector<Block> blocks;
  std::vector<GatheredParameter> parameters;
  std::function<void()> wait;  ///< While the unit is being gathered.
  UnitUsers users;
  bool is_whole = false;
  std::atomic<bool> is_open{false};  ///< Whole, and not being released.
  std::atomic<bool> is_written{false};
  std::atomic<int> pins{0};
  std::atomic<std::uint64_t> touched{0};
  std::uint64_t gathers = 0;

 private:
  ParameterShards& shards_;
};

ParameterShards::ParameterShards(std::vector<ShardedUnit> units, std::unique_ptr<ShardTransport> transport,
                                 std::size_t window, std::size_t prefetch)
    : transport_(std::move(transport)), window_(window), prefetch_(prefetch), gather_stream_(transport_->device()) {
  const PlainTensors plain;
  const int rank = transport_->rank();
  for (ShardedUnit& planned : units) {
    const auto unit = std::make_shared<Unit>(*this, transport_->device());
    unit->name = std::move(planned.name);
    unit->index = units_.size();
    unit->stays_whole = planned.stays_whole;
    // All shards exist before the first parameter loses its memory.
    for (ShardedBlock& given : planned.blocks) {
      const auto options = given.parameters.at(0).tensor.options().requires_grad(false);
      Unit::Block block{.layout = std::move(given.layout),
                        .members = {},
                        .dtype = given.dtype.value_or(given.parameters[0].tensor.scalar_type()),
                        .shard = std::move(given.shard)};
      if (block.shard.defined()) {
        unit->blocks.push_back(std::move(block));
        continue;
      }
      if (rank == 0) {
        block.flat = at::zeros({block.layout.numel}, options);  // Padding is sent too.
        for (std::size_t i = 0; i < given.parameters.size(); ++i)
          block.gathered(i).copy_(in_order(given.parameters[i].tensor));
      }
      block.shard = at::empty({block.layout.shard_numel}, options);
      transport_->scatter(block.shard, std::exchange(block.flat, {}));
      unit->blocks.push_back(std::move(block));
    }
    units_.push_back(unit);
  }
  for (std::size_t u = 0; u < units.size(); ++u) {
    Unit& unit = *units_[u];
    for (std::size_t b = 0; b < units[u].blocks.size(); ++b) {
      for (NamedParameter& parameter : units[u].blocks[b].parameters) {
        places_[parameter.tensor.unsafeGetTensorImpl()] = {
            .unit = &unit, .block = b, .position = unit.blocks[b].members.size()};
        unit.blocks[b].members.push_back(unit.parameters.size());
        unit.parameters.emplace_back(std::move(parameter.name), std::move(parameter.tensor), unit.blocks[b].dtype,
                                     unit.blocks[b].shard.scalar_type(), units_[u]);
      }
    }
  }
  gather_stream_.after_write();
}

ParameterShards::~ParameterShards() {
  for (const auto& unit : units_) {
    for (GatheredParameter& parameter : unit->parameters) parameter.detach();
    try {
      free_memory(*unit);
      if (!gather_stream_.stream()) continue;
      for (const Unit::Block& block : unit->blocks) block.shard.record_stream(*gather_stream_.stream());
    } catch (...) {
      // The device and its memory do not exist any more.
    }
  }
}

at::Tensor ParameterShards::piece(const at::Tensor& parameter) const {
  const Place& place = places_.at(parameter.unsafeGetTensorImpl());
  return place.unit->blocks[place.block].piece(place.position, transport_->rank());
}

FlatLayout::Range ParameterShards::range(const at::Tensor& parameter) const {
  const Place& place = places_.at(parameter.unsafeGetTensorImpl());
  return place.unit->blocks[place.block].layout.range(place.position, transport_->rank());
}

std::pair<std::size_t, std::size_t> ParameterShards::block_of(const at::Tensor& parameter) const {
  const Place& place = places_.at(parameter.unsafeGetTensorImpl());
  return {place.unit->index, place.block};
}

// ---- uses

void ParameterShards::check_scope(const Unit& unit, const char* operation) const {
  if (scopes_ > 0 || torch::autograd::get_current_graph_task_id() >= 0) return;
  throw InvalidArgument(fmt::format(
      "a parameter of unit {} is sharded over {} ranks, and {} used it outside the forward pass and backward: use "
      "parameters on all ranks within gathering() or whole() of FullyShardedDataParallel",
      unit.name, transport_->world_size(), operation));
}

void ParameterShards::begin_pass() {
  const std::lock_guard lock(mutex_);
  order_.begin_pass();
  current_ = nullptr;
}

void ParameterShards::end_backward() {
  const PlainTensors plain;  // No lock: the reducer's lock is held, and start() takes the locks in the other order.
  transport_->agree({.unit = ShardTransport::Tag::kEndOfBackward, .updates = updates_, .wanted = {}});
}

/// Returns whether the use of the unit is a step in the order of units.
bool ParameterShards::moves_to(const Unit& unit) const noexcept {
  return prefetch_ > 0 && !unit.stays_whole && current_.load(std::memory_order_relaxed) != &unit && scopes_of_all_ == 0;
}

/// Makes the unit whole, and starts the gathers of the units that are expected next.
void ParameterShards::use(Unit& unit) {
  const std::lock_guard lock(mutex_);
  const PlainTensors plain;
  unit.touched = ++clock_;
  const bool moves = moves_to(unit);
  if (moves) {
    order_.note(unit.index);
    current_ = &unit;
  }
  if (unit.wait) finish(unit);
  std::vector<Unit*> expected;
  if (moves || !unit.is_whole) expected = expect();
  std::vector<Unit*> wanted;
  std::size_t counted = 0;  // By the window.
  if (!unit.is_whole) {
    adopt(unit);
    wanted.push_back(&unit);
    if (!unit.stays_whole) make_room(++counted);
  }
  for (Unit* next : expected) {
    if (next->is_whole || next->wait || std::count(wanted.begin(), wanted.end(), next) > 0 || !make_room(counted + 1))
      continue;
    wanted.push_back(next);
    ++counted;
  }
  if (!wanted.empty()) start(wanted, unit);
  if (!unit.is_whole) finish(unit);
  unit.users.add_current();
}

/// Returns the units that are expected next. They count as used: they are not released for each other.
std::vector<ParameterShards::Unit*> ParameterShards::expect() {
  std::vector<Unit*> units;
  if (scopes_of_all_ > 0) return units;
  for (const std::size_t index : order_.predict(prefetch_)) {
    units.push_back(units_[index].get());
    units.back()->touched = ++clock_;
    adopt(*units.back());
  }
  return units;
}

void ParameterShards::start(const std::vector<Unit*>& wanted, const Unit& used) {
  ShardTransport::Tag tag{.unit = used.index, .updates = updates_, .wanted = {}};
  if (reductions_.started) tag.reductions = reductions_.started();
  for (const Unit* unit : wanted) tag.wanted.push_back(unit->index);
  const ShardTransport::Agreement agreement = transport_->agree(tag);
  if (reductions_.finish) reductions_.finish(agreement.reductions);
  for (std::size_t i = 0; i < agreement.wanted; ++i) {
    Unit& unit = *wanted[i];
    // The gather stream owns the memory of whole units, and waits for their users before they are released. So a gather
    // runs beside the work on the current stream, and no other tensor gets memory that is in use.
    const c10::OptionalStreamGuard on_gather_stream(gather_stream_.stream());
    std::vector<at::Tensor> flats, shards;
    for (const Unit::Block& block : unit.blocks) {
      flats.push_back(at::empty({block.layout.numel}, block.shard.options().dtype(block.dtype)));
      shards.push_back(block.shard.to(block.dtype));
    }
    auto wait = transport_->start_gather(unit.index, flats, shards);
    if (gather_stream_.stream()) std::exchange(wait, [] {})();  // The gather stream waits, not the host.
    unit.users.start(gather_stream_);
    unit.wait = std::move(wait);
    for (std::size_t b = 0; b < flats.size(); ++b) unit.blocks[b].flat = std::move(flats[b]);
    ++unit.gathers;
    if (!unit.stays_whole) most_whole_ = std::max(most_whole_, ++whole_);
  }
}

/// Waits for the gather of the unit.
void ParameterShards::finish(Unit& unit) {
  try {
    std::exchange(unit.wait, {})();
  } catch (...) {
    free_memory(unit);
    throw;
  }
  unit.users.add_current();
  adopt(unit);
  for (const Unit::Block& block : unit.blocks) {
    for (std::size_t i = 0; i < block.members.size(); ++i)
      unit.parameters[block.members[i]].attach(block.gathered(i).data_ptr());
  }
  unit.is_whole = true;
  unit.is_open = true;
}

/// Releases units until `units` more can be whole. Returns false if operations use too many.
bool ParameterShards::make_room(std::size_t units) {
  while (whole_ + units > window_)
    if (!release_oldest()) return false;
  return true;
}

/// An operation needed more units than the window has.
void ParameterShards::trim() noexcept {
  try {
    const std::lock_guard lock(mutex_);
    const PlainTensors plain;
    while (whole_ > window_ && release_oldest()) {
    }
  } catch (...) {
    // The unit that could not be released stays whole, and the next gather tries again.
  }
}

bool ParameterShards::release_oldest() {
  Unit* oldest = nullptr;
  for (const auto& unit : units_) {
    if ((unit->is_whole || unit->wait) && !unit->stays_whole && unit->pins == 0 &&
        (!oldest || unit->touched < oldest->touched))
      oldest = unit.get();
  }
  return oldest && release(*oldest);
}

/// Returns false if an operation uses the unit.
bool ParameterShards::release(Unit& unit) {
  if (unit.wait) finish(unit);
  if (!unit.is_whole) return true;
  unit.is_open = false;
  if (unit.pins > 0) {  // A thread that pins the unit from now on sees that it is closed, and waits for the mutex.
    unit.is_open = true;
    return false;
  }
  try {
    adopt(unit);
    if (unit.is_written) unit.users.add_current_writer();
    for (Unit::Block& block : unit.blocks) {
      for (std::size_t i = 0; unit.is_written && i < block.members.size(); ++i) block.write_back(i, transport_->rank());
    }
  } catch (...) {
    unit.is_open = true;
    throw;
  }
  unit.is_written = false;
  for (GatheredParameter& parameter : unit.parameters) parameter.detach();
  unit.is_whole = false;
  free_memory(unit);
  return true;
}

void ParameterShards::free_memory(Unit& unit) {
  unit.users.end(gather_stream_);
  for (Unit::Block& block : unit.blocks) block.flat.reset();
  if (!unit.stays_whole) --whole_;
}

void ParameterShards::adopt(Unit& unit) {
  if (unit.wait) return;  // finish() does it.
  for (Unit::Block& block : unit.blocks) {
    for (std::size_t i = 0; i < block.members.size(); ++i) {
      GatheredParameter& parameter = unit.parameters[block.members[i]];
      if (!parameter.is_replaced()) continue;
      gather_stream_.before_write();
      if (block.flat.defined()) unit.users.add_current_writer();
      const at::Tensor values = parameter.replacing_values();
      block.piece(i, transport_->rank()).copy_(block.own_part(values, i, transport_->rank()));
      if (block.flat.defined()) block.gathered(i).copy_(values);
      parameter.restore();
      gather_stream_.after_write();
    }
  }
}

void ParameterShards::adopt() {
  const std::lock_guard lock(mutex_);
  const PlainTensors plain;
  for (const auto& unit : units_) adopt(*unit);
}

void ParameterShards::gather_all() {
  ++scopes_of_all_;
  std::size_t pinned = 0;
  try {
    for (; pinned < units_.size(); ++pinned) units_[pinned]->acquire("whole", /*writes=*/true);
  } catch (...) {
    while (pinned > 0) units_[--pinned]->release();
    --scopes_of_all_;
    throw;
  }
}

void ParameterShards::release_all() noexcept {
  for (const auto& unit : units_) {
    unit->is_written = true;
    unit->release();
  }
  --scopes_of_all_;
}

/// Returns the first unit that is in use; null if all are released.
const ParameterShards::Unit* ParameterShards::release_units() {
  const std::lock_guard lock(mutex_);
  const PlainTensors plain;
  for (const auto& unit : units_) {
    adopt(*unit);
    if (!release(*unit)) return unit.get();
  }
  return nullptr;
}

bool ParameterShards::try_release() { return release_units() == nullptr; }

void ParameterShards::before_update() {
  if (const Unit* unit = release_units())
    throw InvalidArgument(fmt::format(
        "unit {} is in use, so the weights cannot be updated: end the scope of whole() before step()", unit->name));
  gather_stream_.before_write();
}

std::vector<ParameterShards::UnitStats> ParameterShards::stats() const {
  const std::lock_guard lock(mutex_);
  std::vector<UnitStats> all;
  for (const auto& unit : units_) {
    UnitStats stats{.name = unit->name, .parameters = unit->parameters.size(), .gathers = unit->gathers};
    for (const Unit::Block& block : unit->blocks)
      stats.bytes += static_cast<std::size_t>(block.layout.numel) * c10::elementSize(block.dtype);
    all.push_back(std::move(stats));
  }
  return all;
}

}  // namespace ddpkit
