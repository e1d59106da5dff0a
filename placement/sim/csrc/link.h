// The link between the host and the devices: copies that run beside the thread that issued them.
//
// Such a copy is given to a thread of its own, as an accelerator has a copy engine, and the caller
// goes on. The link makes one copy after the other, in the order of their issue, whatever stream
// they were issued on; so a number says which copies have arrived.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace sim {

// Copies are numbered from 1 in the order of their issue. 0 is none, and has always arrived.
using Ticket = uint64_t;

using Time = std::chrono::steady_clock::time_point;

// Copies `nbytes` between host addresses, some time before the ticket has arrived. Both blocks have
// to be there until then.
Ticket send(void* target, const void* source, size_t nbytes);

// Notes the time once everything sent before has arrived.
Ticket send_mark(std::shared_ptr<Time> mark);

bool has_arrived(Ticket ticket);
void wait_for(Ticket ticket);

// Of everything.
Ticket last_sent();

// Copies now, in packets, as a link does it.
void copy_bytes(void* target, const void* source, size_t nbytes);

} // namespace sim
