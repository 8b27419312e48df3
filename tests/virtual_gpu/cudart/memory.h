#pragma once

namespace vgpu {

bool is_device_address(const void* address);

}  // namespace vgpu
