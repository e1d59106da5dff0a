// The device guard: how torch changes the current device and stream, and how torch.Stream and
// torch.Event reach streams.h.
#pragma once

namespace sim {

void register_guard();

} // namespace sim
