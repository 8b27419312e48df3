// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/variant.h"

namespace ddpkit::kernels {

/// c10d's reductions; the values are those of ddpkit::ReduceOp.
enum class Reduction : std::uint8_t { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor };

/// Whether `dtype` has this reduction: bitwise ones are for integers and bool.
bool supports(DataType dtype, Reduction op);

/// What reduce() does: outputs[k][i] = inputs[0][i] op inputs[1][i] op ..., in that order whatever the processor, so
/// that the bits are the same wherever it runs. float16 and bfloat16 are summed in float32 and rounded once. kAvg
/// divides the sum by `input_count`; of integers in 64 bits, towards zero. An output may be one of the inputs. Pointers
/// need no alignment beyond their element's.
struct ReduceArguments {
  DataType dtype = DataType::kUInt8;
  Reduction op = Reduction::kSum;
  std::size_t numel = 0;
  const void* const* inputs = nullptr;  ///< [input]
  std::size_t input_count = 0;
  void* const* outputs = nullptr;  ///< [output]
  std::size_t output_count = 0;
  /// Something else of `numel` elements to copy on the way, or null: a core that waits for one peer's lines to read and
  /// for others to write gets both in little more time than either.
  const void* copy_from = nullptr;
  void* copy_to = nullptr;
};

/// Throws std::logic_error if supports() is false.
void reduce(const ReduceArguments& arguments);
/// One variant; the processor must have its instructions. False if supports() is false.
template <Variant>
bool reduce(const ReduceArguments& arguments);

}  // namespace ddpkit::kernels
