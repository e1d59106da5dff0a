// The allocators: torch's for the device, and the one that takes the place of torch's for the CPU
// in order to lend. Everything that could be released late in the process is leaked on purpose.
#include "device_memory.h"

#include "counters.h"
#include "device.h"
#include "failure_plan.h"
#include "streams.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace sim {
namespace {

constexpr size_t kDefaultCapacity = size_t{80} << 30; // bytes, of each device

Block* allocate_block(size_t nbytes, c10::DeviceIndex device) {
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      !must_fail(PlannedEvent::Allocation),
      "sim out of memory (planned). Tried to allocate ",
      nbytes,
      " bytes on sim:",
      static_cast<int>(device));
  auto* block = device_pool(device).allocate(nbytes, current_stream(device), planned_capacity());
  ++counters().allocations;
  return block;
}

void release_block(void* context) {
  auto* block = static_cast<Block*>(context);
  before_release(block);
  block->pool->release(block);
}

c10::DataPtr to_data_ptr(Block* block) {
  const auto device = block->pool->device();
  return {
      to_device_address(block->host, device),
      block,
      &release_block,
      c10::Device(kDeviceType, device)};
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    return allocate_on_device(nbytes, current_device());
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr; // the context is the Block, not the address
  }

  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    std::memcpy(to_host_address(target), to_host_address(source), nbytes);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {
    for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
      device_pool(device).empty_cache();
    }
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    auto* block = block_of(data);
    if (block != nullptr) {
      block->recorded_streams.push_back(stream.id());
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return device_pool(device).stats();
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    device_pool(device).reset_accumulated_stats();
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    device_pool(device).reset_peak_stats();
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return device_pool(device).free_and_total();
  }
};

thread_local std::optional<c10::DeviceIndex> t_lending_device;

// Lent blocks by address: a CPU DataPtr has to use its address as its context, because oneDNN goes
// through raw_allocate, which demands just that.
class LentBlocks {
 public:
  void add(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_.emplace(block->host, block);
    ++count_;
  }

  // Removes and returns the block at `address`; null if it isn't a lent one.
  Block* take(void* address) {
    if (count_ == 0) {
      return nullptr; // the common case of CPU memory freed outside any operation
    }
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(address);
    if (found == blocks_.end()) {
      return nullptr;
    }
    auto* block = found->second;
    blocks_.erase(found);
    --count_;
    return block;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<void*, Block*> blocks_;
  std::atomic<int64_t> count_{0};
};

LentBlocks& lent_blocks() {
  static auto* blocks = new LentBlocks(); // leaked: memory is freed until the process has gone
  return *blocks;
}

c10::Allocator* g_torch_cpu_allocator = nullptr;

// One deleter for lent and for ordinary memory: raw_deallocate can't say which it has.
void delete_cpu_memory(void* address) {
  if (auto* block = lent_blocks().take(address)) {
    release_block(block);
  } else if (address != nullptr) {
    g_torch_cpu_allocator->raw_deleter()(address);
  }
}

class LendingCpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (!t_lending_device || nbytes == 0) {
      auto data = g_torch_cpu_allocator->allocate(nbytes);
      // Memory with a deleter of its own (none, if it is empty) keeps it.
      std::ignore =
          data.compare_exchange_deleter(g_torch_cpu_allocator->raw_deleter(), &delete_cpu_memory);
      return data;
    }
    auto* block = allocate_block(nbytes, *t_lending_device);
    lent_blocks().add(block);
    return {block->host, block->host, &delete_cpu_memory, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &delete_cpu_memory;
  }

  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }
};

} // namespace

CachingPool& device_pool(c10::DeviceIndex device) {
  static auto* pools = [] {
    auto* all = new std::array<CachingPool*, kMaxDevices>(); // leaked, as above
    for (int index = 0; index < kMaxDevices; ++index) {
      (*all)[index] = new CachingPool("sim:" + std::to_string(index), index, kDefaultCapacity);
    }
    return all;
  }();
  check_device_index(device);
  return *(*pools)[device];
}

c10::DataPtr allocate_on_device(size_t nbytes, c10::DeviceIndex device) {
  if (nbytes == 0) {
    return {nullptr, c10::Device(kDeviceType, device)};
  }
  return to_data_ptr(allocate_block(nbytes, device));
}

c10::DeviceAllocator* device_allocator() {
  static auto* allocator = new DeviceAllocator();
  return allocator;
}

Block* block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &release_block ? static_cast<Block*>(data.get_context()) : nullptr;
}

void resize_device_storage(c10::StorageImpl* storage, size_t nbytes) {
  auto replacement = allocate_on_device(nbytes, storage->device().index());
  const auto kept = std::min(nbytes, storage->nbytes());
  if (kept != 0) {
    if (auto* block = block_of(storage->data_ptr())) {
      before_device_use({block, {0, kept}});
    }
    std::memcpy(to_host_address(replacement.get()), to_host_address(storage->data()), kept);
  }
  storage->set_data_ptr_noswap(std::move(replacement));
  storage->set_nbytes(nbytes);
}

void install_cpu_allocator() {
  g_torch_cpu_allocator = c10::GetCPUAllocator();
  TORCH_CHECK(
      g_torch_cpu_allocator->raw_deleter() != nullptr,
      "sim: the CPU allocator of this process has no raw deleter, so it can't be wrapped");
  c10::SetCPUAllocator(new LendingCpuAllocator(), /*priority=*/255);
}

LendToCpuKernels::LendToCpuKernels(c10::DeviceIndex device)
    : previous_(std::exchange(t_lending_device, device)) {}

LendToCpuKernels::~LendToCpuKernels() {
  t_lending_device = previous_;
}

c10::DataPtr adopt_cpu_memory(c10::StorageImpl* cpu, c10::DeviceIndex device) {
  const auto nbytes = cpu->nbytes();
  if (cpu->data_ptr().get_deleter() == &delete_cpu_memory) {
    if (auto* block = lent_blocks().take(cpu->data_ptr().get())) {
      cpu->_mutable_data_ptr_no_checks().release_context();
      return to_data_ptr(block);
    }
  }
  auto copy = allocate_on_device(nbytes, device);
  if (nbytes != 0) {
    std::memcpy(to_host_address(copy.get()), cpu->data(), nbytes);
  }
  return copy;
}

} // namespace sim
