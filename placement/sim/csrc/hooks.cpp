// Each method hands over to the file that knows.
#include "hooks.h"

#include "device.h"
#include "device_memory.h"
#include "pinned_memory.h"
#include "random.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace sim {
namespace {

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  void init() const override {}

  bool isBuilt() const override {
    return true;
  }

  bool isAvailable() const override {
    return true;
  }

  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }

  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }

  void setCurrentDevice(c10::DeviceIndex device) const override {
    check_device_index(device);
    exchange_device(device);
  }

  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }

  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }

  c10::Device getDeviceFromPtr(void* data) const override {
    return c10::Device(kDeviceType, device_of_address(data));
  }

  bool isPinnedPtr(const void* data) const override {
    return is_pinned_address(data);
  }

  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }

  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }

  // untyped_storage().resize_(), which FSDP frees and allocates its unsharded parameters with.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_device_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

} // namespace

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks()); // torch keeps the pointer for good
  c10::SetAllocator(kDeviceType, device_allocator());
  at::setHostAllocator(kDeviceType, pinned_allocator());
}

} // namespace sim
