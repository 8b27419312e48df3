// Finds accesses to memory that the program does not order. Depends on the order of calls only, not on times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "virtual_gpu/vgpu.h"

namespace vgpu {

class Stream;

/// A vector clock: the number of tasks that are known to be complete. [number of the stream]
using Clock = std::vector<std::uint64_t>;

/// All tasks of the stream so far, and all tasks before them.
Clock clock_of(const Stream& stream);
/// Later tasks of the stream follow these tasks.
void stream_follows(const Stream& stream, const Clock& tasks);
/// Later tasks of all streams follow these tasks: the host has waited for their end.
void host_follows(const Clock& tasks);
/// The host has asked whether these tasks have ended. The answer depends on times, so only allocations follow the
/// tasks: LibTorch's allocator reuses memory after such an answer.
void host_has_polled(const Clock& tasks);

/// Adds a task to the stream. See check_order() in vgpu.h.
void check_task(const Stream& stream, const std::string& what, const std::vector<Access>& accesses,
                bool is_allocation = false);
/// The memory is not in use any more.
void forget_accesses(const void* begin, std::size_t bytes);

}  // namespace vgpu
