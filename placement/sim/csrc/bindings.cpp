// What Python sees of the extension. Loading the module registers nothing with torch;
// `register_all` does, once.
#include "autocast.h"
#include "collectives.h"
#include "copies.h"
#include "counters.h"
#include "device.h"
#include "device_memory.h"
#include "failure_plan.h"
#include "fallback.h"
#include "guard.h"
#include "hooks.h"
#include "pinned_memory.h"
#include "random.h"
#include "recurrent.h"
#include "streams.h"
#include "tensors.h"

#include <torch/csrc/utils/pybind.h>

namespace sim {
namespace {

void register_all(int devices) {
  TORCH_CHECK(device_count() == 0, "sim: everything is registered already");
  set_device_count(static_cast<c10::DeviceIndex>(devices));
  install_cpu_allocator();
  register_guard();
  register_hooks();
  register_fallback();
  register_tensor_operators();
  register_copies();
  register_recurrent_cells();
  register_autocast();
}

c10::DeviceIndex checked_index(int64_t device) {
  check_device_index(device);
  return static_cast<c10::DeviceIndex>(device);
}

pybind11::dict counters_as_dict() {
  const auto& count = counters();
  pybind11::dict result;
  result["allocations"] = count.allocations.load();
  result["host_to_device_copies"] = count.host_to_device_copies.load();
  result["host_to_device_bytes"] = count.host_to_device_bytes.load();
  result["device_to_host_copies"] = count.device_to_host_copies.load();
  result["device_to_host_bytes"] = count.device_to_host_bytes.load();
  result["device_to_device_copies"] = count.device_to_device_copies.load();
  result["device_to_device_bytes"] = count.device_to_device_bytes.load();
  result["collectives"] = count.collectives.load();
  result["fallback_operations"] = count.fallback_operations.load();
  result["out_resizes"] = count.out_resizes.load();
  return result;
}

void set_plan(
    std::optional<uint64_t> allocation,
    std::optional<uint64_t> copy,
    std::optional<uint64_t> collective,
    std::optional<std::pair<uint64_t, uint64_t>> capacity) {
  FailurePlan plan;
  plan.fail_at[static_cast<int>(PlannedEvent::Allocation)] = allocation;
  plan.fail_at[static_cast<int>(PlannedEvent::Copy)] = copy;
  plan.fail_at[static_cast<int>(PlannedEvent::Collective)] = collective;
  if (capacity) {
    plan.lower_capacity_at = capacity->first;
    plan.lowered_capacity = capacity->second;
  }
  set_failure_plan(plan);
}

// (allocations, copies, collectives, fired)
std::tuple<uint64_t, uint64_t, uint64_t, bool> report_as_tuple() {
  const auto report = failure_report();
  return {
      report.seen[static_cast<int>(PlannedEvent::Allocation)],
      report.seen[static_cast<int>(PlannedEvent::Copy)],
      report.seen[static_cast<int>(PlannedEvent::Collective)],
      report.fired};
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("register_all", &register_all);

  module.def("device_count", [] { return static_cast<int>(device_count()); });
  module.def("current_device", [] { return static_cast<int>(current_device()); });
  module.def("set_device", [](int64_t device) { exchange_device(checked_index(device)); });
  module.def("synchronize", [](int64_t device) { synchronize_device(checked_index(device)); });
  module.def(
      "default_generator", [](int64_t device) { return default_generator(checked_index(device)); });

  module.def(
      "capacity", [](int64_t device) { return device_pool(checked_index(device)).capacity(); });
  module.def("set_capacity", [](int64_t device, size_t nbytes) {
    device_pool(checked_index(device)).set_capacity(nbytes);
  });
  module.def("free_and_total", [](int64_t device) {
    return device_pool(checked_index(device)).free_and_total();
  });
  module.def("pinned_bytes", &pinned_bytes);
  module.def("counters", &counters_as_dict);

  module.def("copies_are_delayed", &copies_are_delayed);
  module.def("set_copies_delayed", &set_copies_delayed);

  module.def("set_failure_plan", &set_plan);
  module.def("clear_failure_plan", &clear_failure_plan);
  module.def("failure_report", &report_as_tuple);

  module.def("make_simccl", &make_simccl);
}

} // namespace sim
