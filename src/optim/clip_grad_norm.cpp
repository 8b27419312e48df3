#include <ddpkit/optim/clip_grad_norm.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <unordered_set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

#include "kernels/optimizer.h"
#include "parallel/autograd/gradient_hooks.h"
#include "tensor/parallel_for.h"
#include "tensor/tensor_memory.h"

namespace ddpkit::optim {
namespace {

/// Returns the elements of a gradient: for a sparse gradient, its values.
at::Tensor values_of(const at::Tensor& gradient) {
  return gradient.layout() == at::kSparse ? gradient._values() : gradient;
}

/// Returns whether the kernels can process the values as one contiguous range.
bool suits_kernels(const at::Tensor& values) {
  return values.device().is_cpu() && values.layout() == at::kStrided && has_update_kernels(values.scalar_type()) &&
         values.is_non_overlapping_and_dense();
}

std::optional<kernels::NormKind> kind_of(double norm_type) {
  if (norm_type == 2) return kernels::NormKind::kSquares;
  if (norm_type == 1) return kernels::NormKind::kAbsolutes;
  if (norm_type == std::numeric_limits<double>::infinity()) return kernels::NormKind::kLargest;
  return std::nullopt;
}

/// Computes the norm of a whole from the norms of its parts.
class NormOfParts {
 public:
  explicit NormOfParts(double norm_type) : norm_type_(norm_type) {}
  /// Adds a sum of powers of this order, or the largest absolute value.
  void add_raw(double value) {
    if (std::isinf(norm_type_))
      total_ = value > total_ || std::isnan(value) ? value : total_;
    else
      total_ += value;
  }
  void add_norm(double norm) { add_raw(std::isinf(norm_type_) ? norm : std::pow(norm, norm_type_)); }
  double norm() const {
    if (std::isinf(norm_type_) || norm_type_ == 1) return total_;
    return norm_type_ == 2 ? std::sqrt(total_) : std::pow(total_, 1 / norm_type_);
  }

 private:
  double norm_type_;
  double total_ = 0;
};

std::vector<double> raw_norms(const std::vector<at::Tensor>& tensors, kernels::NormKind kind) {
  std::vector<std::size_t> numels, first_block;
  std::size_t blocks = 0;
  for (const at::Tensor& tensor : tensors) {
    numels.push_back(static_cast<std::size_t>(tensor.numel()));
    first_block.push_back(blocks);
    blocks += blocks_of(numels.back());
  }
  // One result per block, added in order afterwards. The sum does not depend on the assignment of blocks to threads.
  std::vector<double> results(blocks);
  for_blocks(numels, [&](std::size_t task, std::size_t begin, std::size_t count) {
    const kernels::DataType dtype = *dtype_of(tensors[task].scalar_type());
    for (std::size_t done = 0; done < count; done += kBlockElements) {
      kernels::NormArguments arguments{.dtype = dtype,
                                       .kind = kind,
                                       .numel = std::min(kBlockElements, count - done),
                                       .values = advance(tensors[task].const_data_ptr(), begin + done, size_of(dtype))};
      norm(arguments);
      results[first_block[task] + (begin + done) / kBlockElements] = arguments.result;
    }
  });
  return results;
}

/// Splits a long tensor into parts of fixed size. LibTorch would split it by the number of threads, which may differ
/// between ranks.
void append_parts(const at::Tensor& gradient, std::vector<at::Tensor>& parts) {
  if (!gradient.device().is_cpu() || gradient.layout() != at::kStrided) return parts.push_back(gradient);
  for (at::Tensor& part : gradient.view(-1).split(kBlockElements)) parts.push_back(std::move(part));
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : distinct_parameters(parameters)) {
    if (GradientHooks::is_sharded(parameter))
      throw InvalidArgument(fmt::format(
          "the gradient of a parameter [{}] is not in the parameter: a ShardedOptimizer has it; call clip_grad_norm() "
          "of that optimizer",
          fmt::join(parameter.sizes(), ", ")));
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    // An uncoalesced sparse gradient may hold an element several times.
    const at::Tensor values = values_of(gradient.layout() == at::kSparse ? gradient.coalesce() : gradient).detach();
    if (values.numel() == 0) continue;
    // Gradients may have different strides on each rank. The order of memory would change the rounding of the sum.
    gradients.push_back(values.layout() == at::kStrided ? values.contiguous() : values);
  }
  return gradients;
}

}  // namespace

std::vector<at::Tensor> distinct_parameters(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> distinct;
  std::unordered_set<const void*> seen;
  for (const at::Tensor& parameter : parameters) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) distinct.push_back(parameter);
  }
  return distinct;
}

double grad_norm(const std::vector<at::Tensor>& parameters, double norm_type) {
  if (!(norm_type > 0))
    throw InvalidArgument(fmt::format("the order of a norm must be positive, but norm_type is {}", norm_type));
  const at::NoGradGuard no_grad;
  const auto kind = kind_of(norm_type);
  std::vector<at::Tensor> simple;
  std::map<std::string, std::vector<at::Tensor>> others;  // Key: device and type.
  for (const at::Tensor& gradient : gradients_of(parameters)) {
    if (kind && suits_kernels(gradient))
      simple.push_back(gradient);
    else
      append_parts(gradient, others[gradient.device().str() + c10::toString(gradient.scalar_type())]);
  }
  NormOfParts parts(norm_type);
  if (kind) {
    for (const double value : raw_norms(simple, *kind)) parts.add_raw(value);
  }
  for (const auto& [key, gradients] : others) {
    // Powers of the elements, and their sums, can overflow the element type.
    const at::ScalarType dtype = gradients[0].is_complex() ? at::kComplexDouble : at::kDouble;
    const at::Tensor norms = at::stack(at::_foreach_norm(gradients, norm_type, dtype)).to(at::kDouble).cpu();
    for (std::int64_t i = 0; i < norms.numel(); ++i) parts.add_norm(norms.const_data_ptr<double>()[i]);
  }
  return parts.norm();
}

double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                       bool error_if_nonfinite) {
  const double total = grad_norm(parameters, norm_type);
  clip_grads_with_norm_(parameters, max_norm, total, error_if_nonfinite);
  return total;
}

void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double total_norm,
                           bool error_if_nonfinite) {
  if (error_if_nonfinite && !std::isfinite(total_norm))
    throw InvalidArgument(
        fmt::format("the gradients' norm is {}, so they can't be clipped: look for the batch or the layer that made it "
                    "so, or pass error_if_nonfinite = false to scale them all the same",
                    total_norm));
  const double factor = max_norm / (total_norm + 1e-6);
  if (factor >= 1) return;  // NaN stays NaN.
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> simple;
  std::vector<std::size_t> numels;
  for (const at::Tensor& parameter : distinct_parameters(parameters)) {
    if (!parameter.grad().defined()) continue;
    const at::Tensor values = values_of(parameter.grad()).detach();
    if (suits_kernels(values)) {
      simple.push_back(values);
      numels.push_back(static_cast<std::size_t>(values.numel()));
    } else {
      values.mul_(factor);
    }
  }
  for_blocks(numels, [&](std::size_t task, std::size_t begin, std::size_t count) {
    const kernels::DataType dtype = *dtype_of(simple[task].scalar_type());
    kernels::scale({.dtype = dtype,
                    .numel = count,
                    .values = advance(simple[task].data_ptr(), begin, size_of(dtype)),
                    .factor = factor});
  });
  for (const at::Tensor& values : simple) values.unsafeGetTensorImpl()->bump_version();  // As operators do.
}

}  // namespace ddpkit::optim
