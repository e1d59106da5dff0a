// Each method hands over to device.h or streams.h.
#include "guard.h"

#include "device.h"
#include "device_memory.h"
#include "streams.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace sim {
namespace {

Event* as_event(void* event) {
  return static_cast<Event*>(event);
}

c10::Stream make_stream(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, device), id);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kDeviceType;
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(kDeviceType, exchange_device(device.index()));
  }

  c10::Device getDevice() const override {
    return c10::Device(kDeviceType, current_device());
  }

  void setDevice(c10::Device device) const override {
    if (device.has_index()) {
      check_device_index(device.index());
      exchange_device(device.index());
    }
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    exchange_device(device.index());
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }

  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {}; // every dtype
  }

  c10::Stream getStream(c10::Device device) const override {
    const auto index = with_index(device).index();
    return make_stream(index, current_stream(index));
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return make_stream(with_index(device).index(), 0);
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }

  c10::Stream getNewStream(c10::Device device, int) const override {
    return make_stream(with_index(device).index(), new_stream());
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto index = stream.device_index();
    return make_stream(index, exchange_stream(index, stream.id()));
  }

  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }

  bool queryStream(const c10::Stream& stream) const override {
    return query_stream(stream.device_index(), stream.id());
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(stream.device_index(), stream.id());
  }

  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator()->recordStream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    record_event(*as_event(*event), stream.device_index(), stream.id());
  }

  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait_event(*as_event(event), stream.device_index(), stream.id());
    }
  }

  bool queryEvent(void* event) const override {
    return event == nullptr || query_event(*as_event(event));
  }

  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      synchronize_event(*as_event(event));
    }
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete as_event(event);
  }

  // Milliseconds between the two calls of record, since kernels end when they return; if copies on
  // the link came before one, from (to) the time when these had arrived.
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    const auto elapsed = *as_event(end)->recorded_at - *as_event(start)->recorded_at;
    return std::chrono::duration<double, std::milli>(elapsed).count();
  }
};

} // namespace

void register_guard() {
  c10::impl::registerDeviceGuard(kDeviceType, new Guard()); // torch keeps the pointer for good
}

} // namespace sim
