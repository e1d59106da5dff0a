// The number of devices, and each thread's current one.
#include "device.h"

#include <c10/util/Exception.h>

namespace sim {
namespace {

c10::DeviceIndex g_device_count = 0;
thread_local c10::DeviceIndex t_current_device = 0;

} // namespace

c10::DeviceIndex device_count() {
  return g_device_count;
}

void set_device_count(c10::DeviceIndex count) {
  TORCH_CHECK(
      count >= 1 && count <= kMaxDevices,
      "sim: between 1 and ",
      static_cast<int>(kMaxDevices),
      " devices can be simulated, not ",
      static_cast<int>(count));
  g_device_count = count;
}

c10::DeviceIndex current_device() {
  return t_current_device;
}

void check_device_index(int64_t index) {
  TORCH_CHECK(
      index >= 0 && index < g_device_count,
      "sim: invalid device ordinal ",
      index,
      ": there are ",
      static_cast<int>(g_device_count),
      " devices");
}

c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  const auto previous = t_current_device;
  if (index >= 0) {
    t_current_device = index;
  }
  return previous;
}

c10::Device with_index(c10::Device device) {
  return device.has_index() ? device : c10::Device(kDeviceType, t_current_device);
}

} // namespace sim
