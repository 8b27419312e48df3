#include <ddpkit/parallel/power_sgd.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/utils/tensor_flatten.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <sstream>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

namespace ddpkit::comm_hooks {
namespace {

/// Returns the gradient's memory as a matrix: the outermost dimension by the other dimensions. For contiguous memory,
/// the outermost dimension is the first.
at::Tensor as_matrix(const at::Tensor& gradient) {
  std::vector<std::int64_t> dims(static_cast<std::size_t>(gradient.dim()));
  std::iota(dims.begin(), dims.end(), 0);
  std::stable_sort(dims.begin(), dims.end(),
                   [&](std::int64_t a, std::int64_t b) { return gradient.stride(a) > gradient.stride(b); });
  const at::Tensor ordered = gradient.is_contiguous() ? gradient : gradient.permute(dims);
  return ordered.view({ordered.size(0), -1});
}

/// If the first projection leaves at most this part of a column, the rest is rounding errors. Rounding errors may have
/// any direction, including that of the previous columns.
constexpr double kRoundingErrors = 8;  ///< In epsilons of the type, relative to the column.

double epsilon_of(at::ScalarType type) {
  return type == at::kDouble     ? std::numeric_limits<double>::epsilon()
         : type == at::kFloat    ? std::numeric_limits<float>::epsilon()
         : type == at::kBFloat16 ? 0.0078125
                                 : 0.0009765625;
}

/// Returns the column of `spare` that is nearest to orthogonal to the columns `before`. At least 1 / columns of its
/// squared norm is orthogonal, because `before` has fewer columns than `spare`.
at::Tensor choose_spare(const at::Tensor& spare, const at::Tensor& before) {
  if (before.size(2) == 0) return spare.narrow(1, 0, 1);
  const at::Tensor lengths = at::linalg_vector_norm(before.transpose(1, 2).matmul(spare), 2, at::IntArrayRef{1}, true);
  const std::int64_t batch = before.size(0), rows = before.size(1);
  return spare.expand({batch, rows, -1}).gather(2, lengths.argmin(2, /*keepdim=*/true).expand({-1, rows, -1}));
}

/// Projects each column twice, which is enough (Giraud, Langou and Rozložník, 2005). Projects a spare column once,
/// because the projection leaves more of it than rounding errors.
void gram_schmidt(const at::Tensor& matrices, double epsilon, const at::Tensor& spare) {
  const double least = kRoundingErrors * epsilon_of(matrices.scalar_type());
  for (std::int64_t i = 0; i < matrices.size(2); ++i) {
    at::Tensor column = matrices.narrow(2, i, 1);
    const at::Tensor before = matrices.narrow(2, 0, i);
    const auto norm_of_column = [&] { return at::linalg_vector_norm(column, 2, at::IntArrayRef{1}, /*keepdim=*/true); };
    const auto project = [&] { column.sub_(before.bmm(before.transpose(1, 2).bmm(column))); };
    at::Tensor norm = norm_of_column(), is_dependent;
    if (i == 0) {
      is_dependent = norm.eq(0);
    } else {
      const at::Tensor limit = norm * least;
      project();
      norm = norm_of_column();
      is_dependent = norm.le(limit);
    }
    at::where_out(column, is_dependent, choose_spare(spare, before), column);
    column.div_(norm.add_(epsilon).masked_fill_(is_dependent, 1));
    if (i == 0) continue;
    project();
    norm = norm_of_column().add_(epsilon);
    column.div_(norm.masked_fill_(norm.eq(0), 1));
  }
}

/// Makes the columns of each matrix orthonormal, in place. [batch][row][column], with at most as many columns as rows.
/// `epsilon` is added to norms.
///
/// Replaces a column that is zero or depends on previous columns by a part of `spare`. So a matrix of lower rank also
/// has orthonormal columns. `spare` has random orthonormal columns. [row][column]
void orthogonalize(const at::Tensor& matrices, double epsilon, const at::Tensor& spare) {
  // As in Python: QR does not support half types, and is slower for one or two columns.
  const bool half = matrices.scalar_type() == at::kHalf || matrices.scalar_type() == at::kBFloat16;
  if (matrices.size(2) <= 2 || half) {
    gram_schmidt(matrices, epsilon, spare);
  } else {
    // QR replaces dependent columns too. For zero columns it uses unit vectors, which can be orthogonal to a sparse
    // gradient.
    const at::Tensor filled = at::where(matrices.eq(0).all(1, /*keepdim=*/true), spare, matrices);
    matrices.copy_(std::get<0>(at::linalg_qr(filled)));
  }
}

}  // namespace

double PowerSGDStats::compress_rate() const {
  if (numel_after_compression == 0) return 0;
  return static_cast<double>(numel_before_compression) / static_cast<double>(numel_after_compression);
}

struct PowerSGD::State : std::enable_shared_from_this<State> {
  /// State of a parameter, kept from step to step.
  struct Kept {
    at::Tensor error;  ///< The error of this rank, as a matrix.
    at::Tensor q;      ///< Equal on all ranks. [column of the matrix][rank]
    /// Empty until the first backward, and after load().
    std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> parameter;
  };

  /// Gradients that are multiplied together: of equal shape, or a single gradient.
  struct Group {
    at::Tensor matrices;              ///< [position][row][column]: the gradient's memory if the group has one gradient.
    at::Tensor q;                     ///< [position][column][rank]
    std::vector<at::Tensor> members;  ///< [position]
    std::vector<Kept*> kept;          ///< [position]
  };

  /// A bucket between the hook and its finish. Only finish changes the state of PowerSGD: a backward that throws has no
  /// finish.
  struct Compressed {
    std::vector<Group> groups;
    std::vector<at::Tensor> ps;    ///< [position][row][rank] for each group.
    std::vector<at::Tensor> rest;  ///< Gradients sent in full.
    at::Tensor ps_flat, rest_flat;
    Work p_work, rest_work;
  };

  State(ProcessGroup group, const PowerSGDOptions& options)
      : group(std::move(group)), options(options), random(options.random_seed) {}

  bool pays(const at::Tensor& gradient) const;
  Kept& kept_of(const std::string& name, const at::Tensor& parameter, const at::Tensor& matrix);
  std::shared_ptr<Compressed> divide(const GradBucket& bucket);
  BucketReduction reduce(const GradBucket& bucket);
  void choose_qs(Compressed& bucket);
  const at::Tensor& spare(const at::Tensor& factors);
  void decompress(Compressed& bucket);
  /// Returns numpy.random.RandomState(random_seed).randint(1_000_000_000), from which Python seeds each Q.
  std::uint64_t draw_seed() {
    std::uint64_t value = 1'000'000'000;
    while (value >= 1'000'000'000) value = next_random() & 0x3fffffffu;
    return value;
  }

  ProcessGroup group;
  PowerSGDOptions options;
  std::mt19937 random;       ///< State after the last complete backward.
  std::mt19937 next_random;  ///< State of the backward in progress.
  std::uint64_t iterations = 0;
  PowerSGDStats stats;
  std::map<std::string, Kept> kept;  ///< Key: parameter.
  /// Replacements for columns of P and Q that are zero or dependent. Without them, P Q^T would have a lower rank than
  /// possible. A zero column of P also makes the same column of the next Q zero.
  std::map<std::tuple<std::int64_t, std::int64_t, at::ScalarType>, at::Tensor> spares;
};

bool PowerSGD::State::pays(const at::Tensor& gradient) const {
  if (!at::isFloatingType(gradient.scalar_type()) || gradient.dim() < 2 || gradient.numel() == 0 ||
      !gradient.is_non_overlapping_and_dense())
    return false;
  const at::Tensor matrix = as_matrix(gradient);
  const std::int64_t n = matrix.size(0), m = matrix.size(1);
  const std::int64_t sent = (n + m) * std::min({n, m, options.matrix_approximation_rank});
  return static_cast<double>(sent) * options.min_compression_rate < static_cast<double>(n * m);
}

PowerSGD::State::Kept& PowerSGD::State::kept_of(const std::string& name, const at::Tensor& parameter,
                                                const at::Tensor& matrix) {
  Kept& found = kept[name];
  const auto owner = found.parameter ? found.parameter->lock() : parameter.getIntrusivePtr();
  if (owner.defined() && owner.get() != parameter.unsafeGetTensorImpl())
    throw InvalidArgument(
        fmt::format("PowerSGD: parameter {} belongs to another model than the one whose errors this object keeps under "
                    "that name: make a PowerSGD for each DistributedDataParallel",
                    name));
  found.parameter.emplace(parameter.getIntrusivePtr());
  const bool fits = !found.error.defined() ||
                    (found.error.sizes() == matrix.sizes() && found.error.scalar_type() == matrix.scalar_type());
  if (!fits || (found.q.defined() && found.q.size(0) != matrix.size(1)))
    throw InvalidArgument(fmt::format(
        "PowerSGD: parameter {} has a gradient of [{}] {}, but the state kept for it is of another shape or type: it "
        "belongs to another model",
        name, fmt::join(matrix.sizes(), ", "), c10::toString(matrix.scalar_type())));
  return found;
}

/// Adds the errors to the gradients.
std::shared_ptr<PowerSGD::State::Compressed> PowerSGD::State::divide(const GradBucket& bucket) {
  auto result = std::make_shared<Compressed>();
  std::vector<std::pair<at::Tensor, Kept*>> matrices;
  for (std::size_t i = 0; i < bucket.gradients.size(); ++i) {
    const at::Tensor& gradient = bucket.gradients[i];
    stats.numel_before_compression += static_cast<std::uint64_t>(gradient.numel());
    if (!pays(gradient)) {
      result->rest.push_back(gradient);
      stats.numel_after_compression += static_cast<std::uint64_t>(gradient.numel());
      continue;
    }
    const at::Tensor matrix = as_matrix(gradient);
    Kept& of_parameter = kept_of(bucket.names[i], bucket.parameters[i], matrix);
    if (options.use_error_feedback && of_parameter.error.defined()) matrix.add_(of_parameter.error);
    matrices.emplace_back(matrix, &of_parameter);
  }
  // By shape, in the order in which shapes first appear, batched or not: Python's order.
  while (!matrices.empty()) {
    const auto shape = matrices[0].first.sizes().vec();
    const auto others = std::stable_partition(matrices.begin(), matrices.end(),
                                              [&](const auto& entry) { return entry.first.sizes() == shape; });
    for (auto entry = matrices.begin(); entry != others; ++entry) {
      if (entry == matrices.begin() || !options.batch_tensors_with_same_shape) result->groups.emplace_back();
      result->groups.back().members.push_back(entry->first);
      result->groups.back().kept.push_back(entry->second);
    }
    matrices.erase(matrices.begin(), others);
  }
  for (Group& group : result->groups)
    group.matrices = group.members.size() == 1 ? group.members[0].unsqueeze(0) : at::stack(group.members);
  return result;
}

void PowerSGD::State::choose_qs(Compressed& bucket) {
  at::Generator generator;  // One generator for the bucket.
  for (Group& group : bucket.groups) {
    const bool has_qs = std::all_of(group.kept.begin(), group.kept.end(), [](const Kept* k) { return k->q.defined(); });
    if (has_qs) {
      std::vector<at::Tensor> qs;
      for (const Kept* of_parameter : group.kept) qs.push_back(of_parameter->q);
      group.q = at::stack(qs);
    } else {
      if (!generator.defined()) generator = at::make_generator<at::CPUGeneratorImpl>(draw_seed());
      const std::int64_t n = group.matrices.size(1), m = group.matrices.size(2);
      const std::int64_t rank = std::min({options.matrix_approximation_rank, n, m});
      // Drawn on the CPU for every device, so the numbers are equal everywhere.
      // Pinned for a device: from pageable memory the copy would make the host wait.
      const bool on_device = !group.matrices.is_cpu();
      const auto host = group.matrices.options().device(at::kCPU).pinned_memory(on_device);
      group.q = at::empty({group.matrices.size(0), m, rank}, host)
                    .normal_(0, 1, generator)
                    .to(group.matrices.device(), /*non_blocking=*/on_device);
    }
    orthogonalize(group.q, options.orthogonalization_epsilon, spare(group.q));
  }
}

const at::Tensor& PowerSGD::State::spare(const at::Tensor& factors) {
  const std::int64_t rows = factors.size(1), columns = factors.size(2);
  at::Tensor& found = spares[{rows, columns, factors.scalar_type()}];
  if (!found.defined()) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(options.random_seed);
    const at::Tensor random = at::randn({rows, columns}, generator, at::kDouble);
    found = std::get<0>(at::linalg_qr(random)).to(factors.options());
  }
  return found;
}

void PowerSGD::State::decompress(Compressed& bucket) {
  bucket.rest_work.wait();
  if (!bucket.rest.empty())
    at::_foreach_copy_(bucket.rest, torch::utils::unflatten_dense_tensors(bucket.rest_flat, bucket.rest));
  bucket.p_work.wait();
  const auto ps = torch::utils::unflatten_dense_tensors(bucket.ps_flat, bucket.ps);
  std::vector<at::Tensor> qs;
  for (std::size_t g = 0; g < ps.size(); ++g) {
    // The result is equal for a sum and a mean.
    orthogonalize(ps[g], options.orthogonalization_epsilon, spare(ps[g]));
    qs.push_back(at::bmm(bucket.groups[g].matrices.transpose(1, 2), ps[g]));
  }
  const at::Tensor qs_flat = torch::utils::flatten_dense_tensors(qs);
  group.all_reduce(qs_flat);
  qs = torch::utils::unflatten_dense_tensors(qs_flat.div_(group.world_size()), qs);
  for (std::size_t g = 0; g < ps.size(); ++g) {
    Group& group = bucket.groups[g];
    for (std::size_t i = 0; i < group.members.size() && options.use_error_feedback; ++i) {
      at::Tensor& error = group.kept[i]->error;
      if (!error.defined()) error = at::empty_like(group.members[i]);
      error.copy_(group.members[i]);  // Before the product replaces the sent gradient.
    }
    at::bmm_out(group.matrices, ps[g], qs[g].transpose(1, 2));
    for (std::size_t i = 0; i < group.members.size(); ++i) {
      const auto position = static_cast<std::int64_t>(i);
      if (group.members.size() > 1) group.members[i].copy_(group.matrices[position]);
      if (options.use_error_feedback) group.kept[i]->error.sub_(group.members[i]);
      if (options.warm_start) group.kept[i]->q = qs[g][position];
    }
  }
}

BucketReduction PowerSGD::State::reduce(const GradBucket& bucket) {
  const auto parts = iterations < options.start_powerSGD_iter ? nullptr : divide(bucket);
  if (!parts || parts->groups.empty()) return {.work = group.all_reduce_async(bucket.buffer, ReduceOp::kAvg)};
  std::size_t sent_bytes = 0;
  if (!parts->rest.empty()) {
    parts->rest_flat = torch::utils::flatten_dense_tensors(parts->rest);
    parts->rest_work = group.all_reduce_async(parts->rest_flat, ReduceOp::kAvg);
    sent_bytes += parts->rest_flat.nbytes();
  }
  choose_qs(*parts);
  for (const Group& one : parts->groups) {
    parts->ps.push_back(at::bmm(one.matrices, one.q));
    stats.numel_after_compression += static_cast<std::uint64_t>(parts->ps.back().numel() + one.q.numel());
    sent_bytes += parts->ps.back().nbytes() + one.q.nbytes();
  }
  parts->ps_flat = torch::utils::flatten_dense_tensors(parts->ps);
  parts->p_work = group.all_reduce_async(parts->ps_flat);
  return {.work = parts->p_work,
          .finish =
              [self = shared_from_this(), parts] {
                self->decompress(*parts);
                return at::Tensor();
              },
          .sent_bytes = sent_bytes};
}

PowerSGD::PowerSGD(ProcessGroup group, const PowerSGDOptions& options)
    : state_(std::make_shared<State>(std::move(group), options)) {
  if (options.matrix_approximation_rank < 1 || !(options.min_compression_rate >= 0) ||
      !(options.orthogonalization_epsilon >= 0))
    throw InvalidArgument(fmt::format(
        "PowerSGD needs a matrix_approximation_rank of at least 1, and no negative min_compression_rate or "
        "orthogonalization_epsilon, but got {}, {} and {}",
        options.matrix_approximation_rank, options.min_compression_rate, options.orthogonalization_epsilon));
}

BucketReduction PowerSGD::operator()(GradBucket& bucket) {
  if (bucket.index == 0) state_->next_random = state_->random;
  BucketReduction pending = state_->reduce(bucket);
  if (bucket.is_last)
    pending.finish = [state = state_, finish = std::move(pending.finish)] {
      if (finish) finish();
      ++state->iterations;
      state->random = state->next_random;
      return at::Tensor();
    };
  return pending;
}

const PowerSGDOptions& PowerSGD::options() const noexcept { return state_->options; }
std::uint64_t PowerSGD::iterations() const noexcept { return state_->iterations; }
PowerSGDStats PowerSGD::stats() const noexcept { return state_->stats; }

void PowerSGD::save(torch::serialize::OutputArchive& archive) const {
  const State& state = *state_;
  std::ostringstream random;
  random << state.random;
  archive.write("rank", static_cast<std::int64_t>(state.group.rank()));
  archive.write("world_size", static_cast<std::int64_t>(state.group.world_size()));
  archive.write("iterations", static_cast<std::int64_t>(state.iterations));
  archive.write("random", random.str());
  c10::List<std::string> names;
  for (const auto& [name, kept] : state.kept) {
    // Numbered, because a key cannot contain the dots of a parameter's name.
    const std::size_t number = names.size();
    names.push_back(name);
    if (kept.error.defined()) archive.write(fmt::format("error_{}", number), kept.error, /*is_buffer=*/true);
    if (kept.q.defined()) archive.write(fmt::format("q_{}", number), kept.q.clone(), /*is_buffer=*/true);
  }
  archive.write("names", names);
}

void PowerSGD::load(torch::serialize::InputArchive& archive) {
  State& state = *state_;
  const auto read = [&](const char* key) {
    c10::IValue value;
    archive.read(key, value);
    return value;
  };
  const std::int64_t rank = read("rank").toInt(), world_size = read("world_size").toInt();
  if (rank != state.group.rank() || world_size != state.group.world_size())
    throw InvalidArgument(
        fmt::format("PowerSGD: this is the state of rank {} of {}, but here is rank {} of {}: errors belong to a rank; "
                    "start without "
                    "a state when their number has changed",
                    rank, world_size, state.group.rank(), state.group.world_size()));
  std::istringstream(read("random").toStringRef()) >> state.random;
  state.iterations = static_cast<std::uint64_t>(read("iterations").toInt());
  state.kept.clear();
  const auto names = read("names").toListRef();
  for (std::size_t number = 0; number < names.size(); ++number) {
    State::Kept& kept = state.kept[names[number].toStringRef()];
    for (const auto& [key, tensor] : {std::pair("error", &kept.error), std::pair("q", &kept.q)}) {
      if (archive.try_read(fmt::format("{}_{}", key, number), *tensor, /*is_buffer=*/true))
        *tensor = tensor->to(state.group.device());
    }
  }
}

}  // namespace ddpkit::comm_hooks
