// Streams, events, and copies that land after their call.
//
// Every kernel of the simulation has finished when its call returns, so streams order nothing but
// `non_blocking=True` copies between pinned host memory and a device. As long as delaying is
// switched off these run on the link (link.h), beside the host. Who comes after one in the order of
// streams waits for it, and so does whoever gets the memory next, on either side.
//
// While delaying is switched on, such a copy lands as late as it may:
//
//   device to host   What the source holds is taken at issue, which is what a real stream would
//                    have read, since all kernels before it have run. The host target holds poison
//                    until somebody synchronises: code that reads too early gets NaN every time.
//   host to device   The device target holds poison, and the host source is read at landing: code
//                    that overwrites the source too early corrupts the target every time. An
//                    operation that uses the target on a stream ordered after the copy lands it
//                    first; an operation on any other stream computes with poison.
//
// Order is kept as sets. A stream's `before` is the set of delayed copies that its next operation
// comes after: its own and, through the events it waited for, those of other streams (transitively,
// since an event takes its stream's whole set). Synchronising a stream or an event lands its set.
//
// A device block that is freed with a copy out of it still in flight gives that copy poison, unless
// the block's own stream, in whose order it is reused, comes after the copy, or record_stream named
// the copy's stream: on hardware the next owner of the block may have overwritten it by then.
//
// Not modelled: two kernels racing on two streams; a block that is freed with a copy *into* it in
// flight (that copy is dropped); and the waiting that is hidden in some of CUDA's operators, such
// as nonzero (code that relies on it reads poison here).
#pragma once

#include "caching_pool.h"
#include "device.h"
#include "link.h"

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace sim {

// Every byte of a target whose copy hasn't landed. All bits set is NaN in each floating-point type,
// -1 in each signed integer.
constexpr int kPoisonByte = 0xFF;

struct DelayedCopy;
using DelayedCopies = std::vector<std::shared_ptr<DelayedCopy>>;

struct Event {
  DelayedCopies before;
  Ticket sent = 0; // the last copy on the link that it comes after
  std::shared_ptr<Time> recorded_at;
};

// The bytes from `begin` up to `end` of some memory.
struct Bytes {
  size_t begin;
  size_t end;

  size_t size() const {
    return end - begin;
  }
  bool overlaps(const Bytes& other) const {
    return begin < other.end && other.begin < end;
  }
};

struct HostRange {
  c10::Storage storage;
  Bytes bytes;
};
struct DeviceRange {
  Block* block;
  Bytes bytes;
};

// Stream 0 is the default stream of each device. The current stream is a thread's own.
c10::StreamId current_stream(c10::DeviceIndex device);
c10::StreamId exchange_stream(c10::DeviceIndex device, c10::StreamId stream);
c10::StreamId new_stream();

bool copies_are_delayed();
void set_copies_delayed(bool delayed);

// Issue a delayed copy between ranges of one size, on the current stream of the block's device. The
// two functions `before_..._use` below have to be called for the ranges first.
void delay_device_to_host(const DeviceRange& source, const HostRange& target);
void delay_host_to_device(const HostRange& source, const DeviceRange& target);

// Copy between a block's bytes and host memory on the link, on the current stream of its device.
void send_device_to_host(const DeviceRange& source, void* target);
void send_host_to_device(const void* source, const DeviceRange& target);

void record_event(Event& event, c10::DeviceIndex device, c10::StreamId stream);
void wait_event(const Event& event, c10::DeviceIndex device, c10::StreamId stream);

void synchronize_event(const Event& event);
void synchronize_stream(c10::DeviceIndex device, c10::StreamId stream);
void synchronize_device(c10::DeviceIndex device);

// Whether all copies of the set have landed. Asking twice lands them, so that a loop that polls
// ends.
bool query_event(const Event& event);
bool query_stream(c10::DeviceIndex device, c10::StreamId stream);

// To be called before an operation of the current stream reads or writes device memory, ...
void before_device_use(const DeviceRange& range);
// ... before a copy on the link does, which needs no other on the link to have arrived, ...
void before_device_copy(const DeviceRange& range);
// ... before a copy of the current stream of `device` reads or writes host memory, ...
void before_host_use(const HostRange& range, c10::DeviceIndex device);
// ... and before a block goes back to its pool.
void before_release(const Block* block) noexcept;

} // namespace sim
