// The sets of delayed copies, and the moments at which a copy lands or is spoilt.
#include "streams.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <utility>

namespace sim {

struct DelayedCopy {
  enum class Direction { DeviceToHost, HostToDevice };

  Direction direction;
  c10::DeviceIndex device;
  c10::StreamId stream;
  // The host storage stays alive until the copy has landed, as CUDA's pinned allocator sees to it.
  // The device block doesn't: its lifetime is what the code under test may get wrong.
  HostRange host;
  DeviceRange on_device; // the block is null once it was freed
  std::vector<char> snapshot; // device to host: what the source held at issue
  bool was_queried = false;
  bool landed = false;
};

namespace {

std::atomic<bool> g_delay{false};
std::atomic<c10::StreamId> g_next_stream{1};
thread_local std::array<c10::StreamId, kMaxDevices> t_current_streams{};

// Copies in flight. Zero, as it is whenever delaying is off, makes the hooks on every operation and
// every release cost one atomic read.
std::atomic<int64_t> g_in_flight{0};

using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;

// Guards everything below and the members of each DelayedCopy. Never held while a storage or a
// block is released, since that takes the mutex again.
std::mutex g_mutex;
std::map<StreamKey, DelayedCopies>& sets_by_stream() {
  static auto* sets = new std::map<StreamKey, DelayedCopies>();
  return *sets;
}

// The last copy on the link that the next operation of a stream comes after.
std::map<StreamKey, Ticket>& sent_by_stream() {
  static auto* sent = new std::map<StreamKey, Ticket>();
  return *sent;
}

char* host_address(const HostRange& range) {
  auto* storage = range.storage.unsafeGetStorageImpl();
  return static_cast<char*>(storage->mutable_data()) + range.bytes.begin;
}

char* host_address(const DeviceRange& range) {
  return static_cast<char*>(range.block->host) + range.bytes.begin;
}

void drop_landed(DelayedCopies& copies) {
  copies.erase(
      std::remove_if(copies.begin(), copies.end(), [](const auto& copy) { return copy->landed; }),
      copies.end());
}

void add_copies(DelayedCopies& set, const DelayedCopies& more) {
  for (const auto& copy : more) {
    if (!copy->landed && std::find(set.begin(), set.end(), copy) == set.end()) {
      set.push_back(copy);
    }
  }
}

// Completes the copy. Returns the host storage for the caller to let go of outside the mutex.
c10::Storage land(DelayedCopy& copy) {
  copy.landed = true;
  --g_in_flight;
  auto* storage = copy.host.storage.unsafeGetStorageImpl();
  const bool host_is_there = storage->nbytes() >= copy.host.bytes.end;
  if (host_is_there) {
    if (copy.direction == DelayedCopy::Direction::DeviceToHost) {
      std::memcpy(host_address(copy.host), copy.snapshot.data(), copy.snapshot.size());
    } else if (copy.on_device.block != nullptr) {
      std::memcpy(host_address(copy.on_device), host_address(copy.host), copy.host.bytes.size());
    }
  }
  copy.snapshot = {};
  return std::move(copy.host.storage);
}

// Lands those of `copies`, in the order of their issue, that `wanted` names.
template <class Predicate>
void land_where(const DelayedCopies& copies, Predicate wanted, std::vector<c10::Storage>& to_free) {
  for (const auto& copy : copies) {
    if (!copy->landed && wanted(*copy)) {
      to_free.push_back(land(*copy));
    }
  }
}

void land_all(const DelayedCopies& copies, std::vector<c10::Storage>& to_free) {
  land_where(copies, [](const DelayedCopy&) { return true; }, to_free);
}

bool query(const DelayedCopies& copies, std::vector<c10::Storage>& to_free) {
  bool asked_before = true;
  bool all_landed = true;
  for (const auto& copy : copies) {
    if (!copy->landed) {
      all_landed = false;
      const bool was_queried = std::exchange(copy->was_queried, true);
      asked_before = asked_before && was_queried;
    }
  }
  if (all_landed) {
    return true;
  }
  if (asked_before) {
    land_all(copies, to_free);
    return true;
  }
  return false;
}

void issue(std::shared_ptr<DelayedCopy> copy) {
  ++g_in_flight;
  auto& set = sets_by_stream()[{copy->device, copy->stream}];
  drop_landed(set);
  set.push_back(std::move(copy));
}

std::shared_ptr<DelayedCopy> make_copy(
    DelayedCopy::Direction direction, const HostRange& host, const DeviceRange& on_device) {
  auto copy = std::make_shared<DelayedCopy>();
  copy->direction = direction;
  copy->device = on_device.block->pool->device();
  copy->stream = current_stream(copy->device);
  copy->host = host;
  copy->on_device = on_device;
  return copy;
}

bool link_is_idle() {
  return has_arrived(last_sent());
}

Ticket sent_on(c10::DeviceIndex device, c10::StreamId stream) {
  if (link_is_idle()) {
    return 0;
  }
  std::lock_guard<std::mutex> lock(g_mutex);
  return sent_by_stream()[{device, stream}];
}

void send_on_current_stream(
    Block* block, void* target, const void* source, size_t nbytes) {
  const auto device = block->pool->device();
  std::lock_guard<std::mutex> lock(g_mutex);
  const auto ticket = send(target, source, nbytes);
  sent_by_stream()[{device, current_stream(device)}] = ticket;
  block->last_sent = ticket;
}

bool comes_after(const Block& block, const std::shared_ptr<DelayedCopy>& copy) {
  if (block.stream == copy->stream) {
    return true;
  }
  const auto& recorded = block.recorded_streams;
  if (std::find(recorded.begin(), recorded.end(), copy->stream) != recorded.end()) {
    return true;
  }
  const auto set = sets_by_stream().find({block.pool->device(), block.stream});
  return set != sets_by_stream().end() &&
      std::find(set->second.begin(), set->second.end(), copy) != set->second.end();
}

} // namespace

c10::StreamId current_stream(c10::DeviceIndex device) {
  return t_current_streams[device];
}

c10::StreamId exchange_stream(c10::DeviceIndex device, c10::StreamId stream) {
  return std::exchange(t_current_streams[device], stream);
}

c10::StreamId new_stream() {
  return g_next_stream++;
}

bool copies_are_delayed() {
  return g_delay;
}

void set_copies_delayed(bool delayed) {
  g_delay = delayed;
}

void delay_device_to_host(const DeviceRange& source, const HostRange& target) {
  auto copy = make_copy(DelayedCopy::Direction::DeviceToHost, target, source);
  const auto* from = host_address(source);
  copy->snapshot.assign(from, from + source.bytes.size());
  std::memset(host_address(target), kPoisonByte, target.bytes.size());
  std::lock_guard<std::mutex> lock(g_mutex);
  issue(std::move(copy));
}

void delay_host_to_device(const HostRange& source, const DeviceRange& target) {
  auto copy = make_copy(DelayedCopy::Direction::HostToDevice, source, target);
  std::memset(host_address(target), kPoisonByte, target.bytes.size());
  std::lock_guard<std::mutex> lock(g_mutex);
  issue(std::move(copy));
}

void send_device_to_host(const DeviceRange& source, void* target) {
  send_on_current_stream(source.block, target, host_address(source), source.bytes.size());
}

void send_host_to_device(const void* source, const DeviceRange& target) {
  send_on_current_stream(target.block, host_address(target), source, target.bytes.size());
}

void record_event(Event& event, c10::DeviceIndex device, c10::StreamId stream) {
  event.recorded_at = std::make_shared<Time>(std::chrono::steady_clock::now());
  event.sent = sent_on(device, stream);
  if (!has_arrived(event.sent)) {
    event.sent = send_mark(event.recorded_at);
  }
  event.before.clear();
  if (g_in_flight == 0) {
    return;
  }
  std::lock_guard<std::mutex> lock(g_mutex);
  add_copies(event.before, sets_by_stream()[{device, stream}]);
}

void wait_event(const Event& event, c10::DeviceIndex device, c10::StreamId stream) {
  if (!has_arrived(event.sent)) {
    std::lock_guard<std::mutex> lock(g_mutex);
    auto& sent = sent_by_stream()[{device, stream}];
    sent = std::max(sent, event.sent);
  }
  if (g_in_flight == 0) {
    return;
  }
  std::lock_guard<std::mutex> lock(g_mutex);
  auto& set = sets_by_stream()[{device, stream}];
  drop_landed(set);
  add_copies(set, event.before);
}

void synchronize_event(const Event& event) {
  wait_for(event.sent);
  std::vector<c10::Storage> to_free;
  std::lock_guard<std::mutex> lock(g_mutex);
  land_all(event.before, to_free);
}

void synchronize_stream(c10::DeviceIndex device, c10::StreamId stream) {
  wait_for(sent_on(device, stream));
  if (g_in_flight == 0) {
    return;
  }
  std::vector<c10::Storage> to_free;
  std::lock_guard<std::mutex> lock(g_mutex);
  auto& set = sets_by_stream()[{device, stream}];
  land_all(set, to_free);
  set.clear();
}

void synchronize_device(c10::DeviceIndex device) {
  wait_for(last_sent());
  std::vector<c10::Storage> to_free;
  std::lock_guard<std::mutex> lock(g_mutex);
  for (auto& [key, set] : sets_by_stream()) {
    if (key.first == device) {
      land_all(set, to_free);
      set.clear();
    }
  }
}

bool query_event(const Event& event) {
  if (!has_arrived(event.sent)) {
    return false;
  }
  std::vector<c10::Storage> to_free;
  std::lock_guard<std::mutex> lock(g_mutex);
  return query(event.before, to_free);
}

bool query_stream(c10::DeviceIndex device, c10::StreamId stream) {
  if (!has_arrived(sent_on(device, stream))) {
    return false;
  }
  if (g_in_flight == 0) {
    return true;
  }
  std::vector<c10::Storage> to_free;
  std::lock_guard<std::mutex> lock(g_mutex);
  return query(sets_by_stream()[{device, stream}], to_free);
}

void before_device_use(const DeviceRange& range) {
  const auto device = range.block->pool->device();
  wait_for(sent_on(device, current_stream(device)));
  before_device_copy(range);
}

void before_device_copy(const DeviceRange& range) {
  if (g_in_flight == 0) {
    return;
  }
  const auto device = range.block->pool->device();
  std::vector<c10::Storage> to_free;
  std::lock_guard<std::mutex> lock(g_mutex);
  land_where(
      sets_by_stream()[{device, current_stream(device)}],
      [&range](const DelayedCopy& copy) {
        return copy.direction == DelayedCopy::Direction::HostToDevice &&
            copy.on_device.block == range.block && copy.on_device.bytes.overlaps(range.bytes);
      },
      to_free);
}

void before_host_use(const HostRange& range, c10::DeviceIndex device) {
  if (g_in_flight == 0) {
    return;
  }
  std::vector<c10::Storage> to_free;
  std::lock_guard<std::mutex> lock(g_mutex);
  land_where(
      sets_by_stream()[{device, current_stream(device)}],
      [&range](const DelayedCopy& copy) {
        return copy.host.storage.is_alias_of(range.storage) &&
            copy.host.bytes.overlaps(range.bytes);
      },
      to_free);
}

void before_release(const Block* block) noexcept {
  if (g_in_flight == 0) {
    return;
  }
  std::lock_guard<std::mutex> lock(g_mutex);
  for (auto& [key, set] : sets_by_stream()) {
    for (auto& copy : set) {
      if (copy->landed || copy->on_device.block != block) {
        continue;
      }
      if (copy->direction == DelayedCopy::Direction::DeviceToHost && !comes_after(*block, copy)) {
        std::fill(copy->snapshot.begin(), copy->snapshot.end(), static_cast<char>(kPoisonByte));
      }
      copy->on_device.block = nullptr;
    }
  }
}

} // namespace sim
