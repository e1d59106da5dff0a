// The pinned allocator and its register of live blocks.
#include "pinned_memory.h"

#include "caching_pool.h"
#include "link.h"

#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

namespace sim {
namespace {

CachingPool& pool() {
  // leaked: pinned tensors may outlive static destruction
  static auto* instance = new CachingPool("pinned host memory", -1, CachingPool::kUnlimited);
  return *instance;
}

std::mutex g_mutex;
std::map<const char*, size_t>& live_blocks() {
  static auto* blocks = new std::map<const char*, size_t>();
  return *blocks;
}

void release_pinned(void* context) {
  auto* block = static_cast<Block*>(context);
  block->last_sent = last_sent(); // any of these may use it
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    live_blocks().erase(static_cast<const char*>(block->host));
  }
  pool().release(block);
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (nbytes == 0) {
      return {nullptr, cpu};
    }
    auto* block = pool().allocate(nbytes, /*stream=*/0);
    {
      std::lock_guard<std::mutex> lock(g_mutex);
      live_blocks().emplace(static_cast<const char*>(block->host), nbytes);
    }
    return {block->host, block, &release_pinned, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr; // the context is the Block, not the address
  }

  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }

  bool record_event(void*, void*, c10::Stream) override {
    return true; // a delayed copy holds its host storage itself, and a release waits for the link
  }

  void empty_cache() override {
    pool().empty_cache();
  }

  at::HostStats get_stats() override {
    const auto from = pool().stats();
    at::HostStats stats;
    stats.active_requests = from.allocation[0];
    stats.active_bytes = from.allocated_bytes[0];
    stats.allocations = from.segment[0];
    stats.allocated_bytes = from.reserved_bytes[0];
    stats.num_host_alloc = from.num_device_alloc;
    stats.num_host_free = from.num_device_free;
    return stats;
  }

  void reset_accumulated_stats() override {
    pool().reset_accumulated_stats();
  }

  void reset_peak_stats() override {
    pool().reset_peak_stats();
  }
};

} // namespace

at::HostAllocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator();
  return allocator;
}

bool is_pinned_address(const void* address) {
  const auto* wanted = static_cast<const char*>(address);
  std::lock_guard<std::mutex> lock(g_mutex);
  const auto after = live_blocks().upper_bound(wanted);
  if (after == live_blocks().begin()) {
    return false;
  }
  const auto& [start, nbytes] = *std::prev(after);
  return wanted < start + nbytes;
}

size_t pinned_bytes() {
  return static_cast<size_t>(pool().stats().allocated_bytes[0].current);
}

} // namespace sim
