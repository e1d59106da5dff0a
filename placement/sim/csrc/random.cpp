// The generator, its state, and how a CPU generator is seeded from it.
#include "random.h"

#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <cstring>
#include <random>

namespace sim {
namespace {

constexpr size_t kStateBytes = 16;
constexpr uint64_t kPhiloxWords = 4; // random words a Philox counter yields: offsets are multiples

class SimGenerator final : public c10::GeneratorImpl {
 public:
  explicit SimGenerator(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(kDeviceType, device), c10::DispatchKeySet(kDispatchKey)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }

  uint64_t current_seed() const override {
    return seed_;
  }

  uint64_t seed() override {
    std::random_device source;
    set_current_seed((uint64_t{source()} << 32) | source());
    return seed_;
  }

  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }

  uint64_t get_offset() const override {
    return offset_;
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({static_cast<int64_t>(kStateBytes)}, at::kByte);
    auto* bytes = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(bytes, &seed_, sizeof(seed_));
    std::memcpy(bytes + sizeof(seed_), &offset_, sizeof(offset_));
    return state.getIntrusivePtr();
  }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.is_cpu() && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() &&
            state.numel() == static_cast<int64_t>(kStateBytes) && state.is_contiguous(),
        "sim: a generator's state is a contiguous uint8 tensor of ",
        kStateBytes,
        " elements on the CPU");
    const auto* bytes = static_cast<const char*>(state.data());
    std::memcpy(&seed_, bytes, sizeof(seed_));
    std::memcpy(&offset_, bytes + sizeof(seed_), sizeof(offset_));
  }

  // A seed for one operation, from the state, which moves on.
  uint64_t next(uint64_t elements) {
    // splitmix64, so that neighbouring offsets give unrelated seeds
    auto mixed = seed_ * 0x9E3779B97F4A7C15u + offset_ + 1;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
    mixed ^= mixed >> 31;
    offset_ += (elements + kPhiloxWords - 1) / kPhiloxWords * kPhiloxWords;
    return mixed;
  }

 private:
  SimGenerator* clone_impl() const override {
    auto* clone = new SimGenerator(device().index());
    clone->seed_ = seed_;
    clone->offset_ = offset_;
    return clone;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

} // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = [] {
    auto* all = new std::array<at::Generator, kMaxDevices>();
    for (int index = 0; index < kMaxDevices; ++index) {
      (*all)[index] = at::make_generator<SimGenerator>(static_cast<c10::DeviceIndex>(index));
    }
    return all;
  }();
  const auto index = device < 0 ? current_device() : device;
  check_device_index(index);
  return (*generators)[index];
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<SimGenerator>(device < 0 ? current_device() : device);
}

at::Generator cpu_generator_for(const at::Generator& generator, uint64_t elements) {
  if (generator.device().type() != kDeviceType) {
    return generator;
  }
  auto* own = static_cast<SimGenerator*>(generator.unsafeGetGeneratorImpl());
  std::lock_guard<std::mutex> lock(own->mutex_);
  return at::detail::createCPUGenerator(own->next(elements));
}

} // namespace sim
