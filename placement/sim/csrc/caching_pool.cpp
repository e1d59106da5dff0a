// Serving from the cache, growing up to the capacity, and the arithmetic of the statistics.
#include "caching_pool.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>

namespace sim {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;

Stat& total(StatArray& stat) {
  return stat[static_cast<size_t>(StatType::AGGREGATE)];
}

const Stat& total(const StatArray& stat) {
  return stat[static_cast<size_t>(StatType::AGGREGATE)];
}

size_t round_up(size_t nbytes) {
  return (nbytes + CachingPool::kGranularity - 1) / CachingPool::kGranularity *
      CachingPool::kGranularity;
}

} // namespace

CachingPool::CachingPool(std::string name, c10::DeviceIndex device, size_t capacity)
    : name_(std::move(name)), device_(device), capacity_(capacity) {}

Block* CachingPool::allocate(
    size_t nbytes, c10::StreamId stream, std::optional<size_t> temporary_capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto limit = std::min(capacity_, temporary_capacity.value_or(kUnlimited));
  if (reserved() > limit) {
    destroy_cached();
  }
  const auto rounded = round_up(nbytes);
  auto* block = take_cached(rounded, stream);
  if (block == nullptr) {
    block = create(rounded, stream, limit);
  }
  if (block == nullptr) {
    ++stats_.num_alloc_retries;
    destroy_cached();
    block = create(rounded, stream, limit);
  }
  if (block == nullptr) {
    ++stats_.num_ooms;
    const bool fits = reserved() + rounded <= limit;
    raise_out_of_memory(nbytes, limit, fits ? " The machine itself has no more memory." : "");
  }
  block->requested = nbytes;
  total(stats_.allocation).increase(1);
  total(stats_.active).increase(1);
  for (auto* stat : {&stats_.allocated_bytes, &stats_.active_bytes, &stats_.requested_bytes}) {
    total(*stat).increase(nbytes);
  }
  return block;
}

void CachingPool::release(Block* block) {
  std::lock_guard<std::mutex> lock(mutex_);
  total(stats_.allocation).decrease(1);
  total(stats_.active).decrease(1);
  for (auto* stat : {&stats_.allocated_bytes, &stats_.active_bytes, &stats_.requested_bytes}) {
    total(*stat).decrease(block->requested);
  }
  block->requested = 0;
  block->recorded_streams.clear();
  if (reserved() > capacity_) {
    destroy(block);
  } else {
    cached_[block->stream].emplace(block->reserved, block);
  }
}

void CachingPool::empty_cache() {
  std::lock_guard<std::mutex> lock(mutex_);
  destroy_cached();
}

size_t CachingPool::capacity() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return capacity_;
}

void CachingPool::set_capacity(size_t nbytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  capacity_ = nbytes;
  if (reserved() > capacity_) {
    destroy_cached();
  }
}

c10::CachingDeviceAllocator::DeviceStats CachingPool::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

void CachingPool::reset_accumulated_stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto* stat :
       {&stats_.allocation,
        &stats_.segment,
        &stats_.active,
        &stats_.allocated_bytes,
        &stats_.reserved_bytes,
        &stats_.active_bytes,
        &stats_.requested_bytes}) {
    total(*stat).reset_accumulated();
  }
  stats_.num_alloc_retries = 0;
  stats_.num_ooms = 0;
  stats_.num_device_alloc = 0;
  stats_.num_device_free = 0;
}

void CachingPool::reset_peak_stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto* stat :
       {&stats_.allocation,
        &stats_.segment,
        &stats_.active,
        &stats_.allocated_bytes,
        &stats_.reserved_bytes,
        &stats_.active_bytes,
        &stats_.requested_bytes}) {
    total(*stat).reset_peak();
  }
}

std::pair<size_t, size_t> CachingPool::free_and_total() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {capacity_ - std::min(capacity_, reserved()), capacity_};
}

Block* CachingPool::take_cached(size_t rounded, c10::StreamId stream) {
  const auto blocks = cached_.find(stream);
  if (blocks == cached_.end()) {
    return nullptr;
  }
  const auto best = blocks->second.lower_bound(rounded);
  const auto largest_fit = rounded + rounded / 8; // wastes at most an eighth
  if (best == blocks->second.end() || best->first > largest_fit) {
    return nullptr;
  }
  auto* block = best->second;
  blocks->second.erase(best);
  wait_for(block->last_sent);
  return block;
}

Block* CachingPool::create(size_t rounded, c10::StreamId stream, size_t limit) {
  if (rounded > limit || reserved() > limit - rounded) {
    return nullptr;
  }
  void* host = nullptr;
  if (posix_memalign(&host, kGranularity, rounded) != 0) {
    return nullptr;
  }
  ++stats_.num_device_alloc;
  total(stats_.segment).increase(1);
  total(stats_.reserved_bytes).increase(rounded);
  return new Block{this, host, rounded, /*requested=*/0, stream, {}};
}

void CachingPool::destroy(Block* block) {
  wait_for(block->last_sent);
  ++stats_.num_device_free;
  total(stats_.segment).decrease(1);
  total(stats_.reserved_bytes).decrease(block->reserved);
  std::free(block->host);
  delete block;
}

void CachingPool::destroy_cached() {
  for (auto& [stream, blocks] : cached_) {
    for (auto& [size, block] : blocks) {
      destroy(block);
    }
  }
  cached_.clear();
}

size_t CachingPool::allocated() const {
  return static_cast<size_t>(total(stats_.allocated_bytes).current);
}

size_t CachingPool::reserved() const {
  return static_cast<size_t>(total(stats_.reserved_bytes).current);
}

void CachingPool::raise_out_of_memory(size_t nbytes, size_t limit, const char* reason) {
  using c10::CachingAllocator::format_size;
  const auto free = limit - std::min(limit, reserved());
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      false,
      "sim out of memory. Tried to allocate ",
      format_size(nbytes),
      " (",
      nbytes,
      " bytes). ",
      name_,
      " has a total capacity of ",
      format_size(limit),
      " (",
      limit,
      " bytes) of which ",
      format_size(free),
      " (",
      free,
      " bytes) is free. Of the reserved memory ",
      allocated(),
      " bytes are allocated and ",
      reserved() - allocated(),
      " bytes are rounding or cached.",
      reason);
}

} // namespace sim
