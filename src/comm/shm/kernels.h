// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "data_type.h"

namespace ddpkit::shm {

/// c10d's reductions; the values are those of ddpkit::ReduceOp.
enum class Reduction : std::uint8_t { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor };

/// Whether `dtype` has this reduction: bitwise ones are for integers and bool.
bool supports(DataType dtype, Reduction op);

/// outputs[k][i] = inputs[0][i] op inputs[1][i] op ..., in that order whatever the processor, so that the bits are the
/// same wherever it runs. float16 and bfloat16 are summed in float32 and rounded once. kAvg divides the sum by `count`.
/// An output may be one of the inputs. Pointers need no alignment beyond their element's.
void reduce(DataType dtype, Reduction op, std::size_t numel, const void* const* inputs, std::size_t input_count,
            void* const* outputs, std::size_t output_count);

/// Which variant reduce() uses here: "avx512", "avx2" or "baseline".
const char* kernel_variant();

}  // namespace ddpkit::shm
