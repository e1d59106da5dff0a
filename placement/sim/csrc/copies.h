// Copies between host and device, and between devices: counted, made to fail on request, and
// delayed where a real copy would be asynchronous (streams.h).
#pragma once

namespace sim {

void register_copies();

} // namespace sim
