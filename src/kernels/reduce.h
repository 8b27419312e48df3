// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/variant.h"

namespace ddpkit::kernels {

/// c10d's reductions, with the values of ddpkit::ReduceOp.
enum class Reduction : std::uint8_t { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor };

/// Returns whether `dtype` has this reduction. Bitwise reductions are for integers and bool.
bool supports(DataType dtype, Reduction op);

/// Arguments of reduce(): outputs[k][i] = inputs[0][i] op inputs[1][i] op ..., in this order on every processor, so
/// results are bitwise equal. float16 and bfloat16 are summed in float32 and rounded once. kAvg divides the sum by
/// `input_count`; integers in 64 bits, rounded towards zero. An output may be one of the inputs. Pointers need only the
/// alignment of their element type.
struct ReduceArguments {
  DataType dtype = DataType::kUInt8;
  Reduction op = Reduction::kSum;
  std::size_t numel = 0;
  const void* const* inputs = nullptr;  ///< [input]
  std::size_t input_count = 0;
  void* const* outputs = nullptr;  ///< [output]
  std::size_t output_count = 0;
  /// A second buffer of `numel` elements to copy in the same pass, or null. The core overlaps the read of one peer's
  /// cache lines with the write of others, so both take little more time than one.
  const void* copy_from = nullptr;
  void* copy_to = nullptr;
};

/// Throws std::logic_error if supports() is false.
void reduce(const ReduceArguments& arguments);
/// One variant; the processor must support its instructions. Returns false if supports() is false.
template <Variant>
bool reduce(const ReduceArguments& arguments);

}  // namespace ddpkit::kernels
