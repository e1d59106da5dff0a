// The one instance of the counters.
#include "counters.h"

namespace sim {

Counters& counters() {
  static auto* instance = new Counters(); // leaked: deleters count until the process has gone
  return *instance;
}

} // namespace sim
