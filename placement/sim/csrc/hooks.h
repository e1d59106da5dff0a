// The hooks through which generic torch code asks an accelerator for what has no operator: its
// devices, its pinned memory, its generators, and the resizing of a storage.
#pragma once

namespace sim {

void register_hooks();

} // namespace sim
