// What the simulated device is: its type, its dispatch key, how many of it there are, which one is
// current on this thread, and how its addresses look.
//
// Device memory is host memory whose address carries a tag: bit 54, and the device index in bits
// 48 to 52. No user-space mapping has such an address, so host code that follows one faults, as it
// would on a real accelerator. Kernels of the simulation remove the tag first.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>

#include <cstdint>

namespace sim {

constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKey kDispatchKey = c10::DispatchKey::PrivateUse1;
constexpr c10::DeviceIndex kMaxDevices = 16;

constexpr int kDeviceShift = 48;
constexpr uint64_t kDeviceTag = uint64_t{1} << 54;
constexpr uint64_t kAddressMask = (uint64_t{1} << kDeviceShift) - 1;

inline void* to_device_address(void* host, c10::DeviceIndex device) {
  if (host == nullptr) {
    return nullptr;
  }
  const auto index_bits = static_cast<uint64_t>(device) << kDeviceShift;
  return reinterpret_cast<void*>(reinterpret_cast<uint64_t>(host) | kDeviceTag | index_bits);
}

inline void* to_host_address(const void* device) {
  return reinterpret_cast<void*>(reinterpret_cast<uint64_t>(device) & kAddressMask);
}

inline c10::DeviceIndex device_of_address(const void* device) {
  return static_cast<c10::DeviceIndex>((reinterpret_cast<uint64_t>(device) >> kDeviceShift) & 31);
}

c10::DeviceIndex device_count();
void set_device_count(c10::DeviceIndex count);

c10::DeviceIndex current_device();

// Raises for an index that no device has.
void check_device_index(int64_t index);

// Makes `index` current on this thread and returns the one before. Negative: no change.
c10::DeviceIndex exchange_device(c10::DeviceIndex index);

// `device` with its index filled in, from the current device where it has none.
c10::Device with_index(c10::Device device);

class CurrentDeviceGuard {
 public:
  explicit CurrentDeviceGuard(c10::DeviceIndex index) : previous_(exchange_device(index)) {}
  ~CurrentDeviceGuard() {
    exchange_device(previous_);
  }
  CurrentDeviceGuard(const CurrentDeviceGuard&) = delete;
  CurrentDeviceGuard& operator=(const CurrentDeviceGuard&) = delete;

 private:
  c10::DeviceIndex previous_;
};

} // namespace sim
